import pytest
import torch


@pytest.fixture(scope="session")
def photographs(data_folder):
    """(100, 3, 32, 32) real pictures in [0, 1]."""
    from secateur.data.load import load

    dataset = load("cifar10", data_folder, download=False)
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (dataset.mean, dataset.std))
    return (dataset.inputs[-100:] * std + mean).clamp(0, 1)
