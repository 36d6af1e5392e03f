"""The stages of an audit as a PyTorch user writes them: what benchmarks/audit.py measures against."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, one_hot
from torch.utils.data import DataLoader, TensorDataset

from secateur.interfaces import Batch, Mask

Sides = tuple[Batch, Batch]  # members, non-members


def loader(batch: Batch, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of 128."""
    return DataLoader(TensorDataset(*batch), 128, shuffle=shuffle)


def fit(net: nn.Module, train: Batch, validation: Batch, epochs: int, mask: Mask | None = None) -> None:
    """Adam over DataLoader batches, judged on the validation rows every epoch; pruned weights stay zero."""
    optimiser = torch.optim.Adam(net.parameters(), 1e-3, weight_decay=5e-4)
    best, lowest = copy.deepcopy(net.state_dict()), float("inf")
    for _ in range(epochs):
        net.train()
        for inputs, labels in loader(train, shuffle=True):
            optimiser.zero_grad()
            cross_entropy(net(inputs), labels).backward()
            optimiser.step()
            with torch.no_grad():
                for name, value in net.named_parameters() if mask else ():
                    if name in mask:
                        value.mul_(mask[name])
        net.eval()
        with torch.no_grad():
            loss = sum(float(cross_entropy(net(x), y, reduction="sum")) for x, y in loader(validation))
        if loss < lowest:
            best, lowest = copy.deepcopy(net.state_dict()), loss
    net.load_state_dict(best)


@torch.no_grad()
def predict(net: nn.Module, batch: Batch) -> Tensor:
    """(N, K) probabilities."""
    net.eval()
    return torch.cat([net(inputs).softmax(1) for inputs, _ in loader(batch)])


@torch.no_grad()
def sensitivity(net: nn.Module, batch: Batch) -> Tensor:
    """(N, K) Eq. 2, with ten passes over the data beside the one for f(x)."""
    net.eval()
    rows = []
    for inputs, _ in loader(batch):
        answer = net(inputs).softmax(1)
        moved = [net(inputs + 1e-3 * torch.randn_like(inputs)).softmax(1) for _ in range(10)]
        rows.append(sum((one - answer).abs() / 1e-3 for one in moved) / 10)
    return torch.cat(rows)


def threshold(members: Tensor, nonmembers: Tensor) -> float:
    """The best threshold by trying every value."""
    best, found = -1.0, 0.0
    for value in torch.cat([members, nonmembers]):
        accuracy = float((members >= value).float().mean() + (nonmembers < value).float().mean()) / 2
        if accuracy > best:
            best, found = accuracy, float(value)
    return found


def threshold_attack(feature: str, nets: list[nn.Module], sides: list[Sides], classes: int) -> Tensor:
    """One attack from its own queries to its decisions about the victim (the first net)."""
    values, labels = [], []
    for net, (members, nonmembers) in zip(nets, sides, strict=True):
        pairs = [(predict(net, side), side.labels) for side in (members, nonmembers)]
        values.append([_feature(feature, *pair) for pair in pairs])
        labels.append([y for _, y in pairs])
    inside, outside = (torch.cat([v[i] for v in values[1:]]) for i in (0, 1))
    of_inside, of_outside = (torch.cat([y[i] for y in labels[1:]]) for i in (0, 1))
    learnt = [threshold(inside[of_inside == k], outside[of_outside == k]) for k in range(classes)]
    return torch.cat(values[0]) >= torch.tensor(learnt)[torch.cat(labels[0])]


def _feature(name: str, p: Tensor, y: Tensor) -> Tensor:
    true = p.gather(1, y[:, None]).squeeze(1)
    if name == "conf":
        return true
    if name == "xent":
        return true.clamp_min(1e-30).log()
    if name == "top1-conf":
        return p.amax(1)
    others = (p * (1 - p).clamp_min(1e-30).log()).scatter(1, y[:, None], 0).sum(1)
    return (1 - true) * true.clamp_min(1e-30).log() + others


def samia_inputs(net: nn.Module, side: Batch, classes: int) -> Tensor:
    """(N, 3K)."""
    p = predict(net, side)
    return torch.cat([p, sensitivity(net, side), one_hot(side.labels, classes).to(p)], 1)


class Samia(nn.Module):
    """SAMIA's network of the library's encoder layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.scale = nn.BatchNorm1d(3 * classes)
        self.embed = nn.Linear(3, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.2, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * classes, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3K) -> (N, 2)."""
        tokens = self.scale(x).view(len(x), 3, self.classes).transpose(1, 2)
        return self.head(self.encoder(gelu(self.embed(tokens))))


def samia_epoch(net: Samia, optimiser: torch.optim.Optimizer, rows: Batch, victim: Batch) -> float:
    """An epoch over the shadows' rows, then the victim's accuracy."""
    net.train()
    for inputs, truths in loader(rows, shuffle=True):
        optimiser.zero_grad()
        cross_entropy(net(inputs), truths).backward()
        optimiser.step()
    net.eval()
    with torch.no_grad():
        hits = [(net(inputs).argmax(1) == truths).sum() for inputs, truths in loader(victim)]
    return float(sum(hits)) / victim.size
