"""The network, the data and the training of the app."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.sigmoid(self.conv2(torch.sigmoid(self.conv1(x))))
        return self.fc2(torch.sigmoid(self.fc1(x.flatten(1))))


def load_data(partition, partitions, batch_size, examples=0):
    """A client's training and test batches; its rows are every `partitions`-th one."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # in [-1, 1]
    labels = torch.tensor(digits.target)
    mine = torch.arange(partition, len(labels), partitions)
    split = int(0.8 * len(mine))
    train, test = mine[: examples or split], mine[split:]
    loader = DataLoader(TensorDataset(pixels[train], labels[train]), batch_size, shuffle=True)
    return loader, DataLoader(TensorDataset(pixels[test], labels[test]), 128)


def train(net, loader, epochs, optimizer, lr):
    """Train for whole epochs; return the mean loss."""
    criterion, optimizer, total = nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](net.parameters(), lr=lr), 0.0
    net.train()
    for _ in range(epochs):
        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(pictures), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader):
    """The share of right answers."""
    net.eval()
    with torch.no_grad():
        hits = sum((net(pictures).argmax(1) == labels).sum().item() for pictures, labels in loader)
    return hits / len(loader.dataset)
