"""The loaders on real files: what is known of these data sets must come out."""

import pytest

from secateur.data.load import load

pytestmark = pytest.mark.data


def test_mnist_is_complete_and_verified(data_folder):
    data = load("mnist", data_folder, download=False)
    assert (len(data.labels), data.train_size, data.verified) == (70_000, 60_000, True)
    assert data.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.labels[60_000:60_005].tolist() == [7, 2, 1, 0, 4]
    assert abs(data.inputs[:60_000].mean()) < 1e-3  # mean and deviation are those of the train part
    assert abs(data.inputs[:60_000].std() - 1) < 1e-3


def test_qmnist_has_disjoint_writers(data_folder):
    data = load("qmnist", data_folder, download=False)
    assert len(data.labels) == 70_000
    train, test = data.writers[:60_000], data.writers[60_000:]
    assert (len(train.unique()), len(test.unique())) == (539, 297)
    assert not set(train.tolist()) & set(test.tolist())
    counts = train.unique(return_counts=True)[1]
    assert (int(counts.min()), int(counts.max())) == (19, 131)


def test_the_part_of_cifar10(data_folder):
    data = load("cifar10", data_folder, download=False)
    assert (data.inputs.shape, data.train_size) == ((12_000, 3, 32, 32), 10_000)
    assert data.labels[:10_000].bincount().tolist() == [1000] * 10
    assert data.labels[10_000:].bincount().tolist() == [200] * 10
    assert not data.verified
    assert data.inputs.mean((0, 2, 3)).abs().max() < 0.05


def test_fashion_mnist(data_folder):
    data = load("fashion-mnist", data_folder, download=False)
    assert data.input_shape == (1, 28, 28)
    assert data.train_size >= 10_000
    assert len(data.labels.unique()) == 10
    assert abs(data.inputs[: data.train_size].mean()) < 0.02


def test_femnist(data_folder):
    data = load("femnist", data_folder, download=False)
    assert data.labels.unique().tolist() == list(range(62))
    writers = data.writers.unique()
    assert writers.tolist() == list(range(len(writers)))
    assert data.inputs.max().item() == pytest.approx((1 - 0.9652) / 0.1559, abs=1e-4)  # paper is 1.0
    assert not set(data.writers[: data.train_size].tolist()) & set(data.writers[data.train_size :].tolist())


def test_location(data_folder, monkeypatch):
    monkeypatch.setenv("SECATEUR_DATA", str(data_folder))
    data = load("location", download=False)  # found through the variable
    assert (data.inputs.shape, data.classes) == ((5010, 446), 30)
    assert data.labels.unique().tolist() == list(range(30))
    assert data.inputs.unique().tolist() == [0, 1]
    assert data.labels[0] == 12
