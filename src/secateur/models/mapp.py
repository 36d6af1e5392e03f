"""The network of MaPP-FL (Figure 5) at four widths, cut to sub-models by its channels."""

from __future__ import annotations

from torch import Tensor, nn

from secateur.models.create import channels, model


class Scaler(nn.Module):
    """Division by the share of channels that a sub-model keeps: f(x) = x / r_c (MaPP-FL Eq. 9)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled activations."""
        return x if self.rate == 1 else x / self.rate


def _layer(inputs: int, outputs: int, rate: float) -> list[nn.Module]:
    # Static BatchNorm: batch statistics in training and in testing, so that no statistics are sent.
    norm = nn.BatchNorm2d(outputs, track_running_stats=False)
    return [nn.Conv2d(inputs, outputs, 3, padding=1), Scaler(rate), norm, nn.ReLU()]


def mapp_cnn(unit: int, input_shape: tuple[int, ...], classes: int, rate: float) -> nn.Module:
    """Build four convolutions of u, 2u, 4u and 8u channels, where u is `unit` and r_c is `rate` (MaPP-FL Figure 5)."""
    layers = _layer(channels(f"mapp-cnn-{unit}", input_shape, smallest=8), unit, rate)
    for step in (1, 2, 4):
        layers += [nn.MaxPool2d(2), *_layer(step * unit, 2 * step * unit, rate)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * unit, classes))


@model("mapp-cnn-8", "mapp_fl")
def mapp_cnn_8(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, rate: float = 1.0) -> nn.Module:
    """The CNN of MaPP-FL (Figure 5) with u = 8, its small clients' (30k)."""
    return mapp_cnn(8, input_shape, classes, rate)


@model("mapp-cnn-16", "mapp_fl")
def mapp_cnn_16(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, rate: float = 1.0) -> nn.Module:
    """The CNN of MaPP-FL (Figure 5) with u = 16, its server's (100k)."""
    return mapp_cnn(16, input_shape, classes, rate)


@model("mapp-cnn-32", "mapp_fl")
def mapp_cnn_32(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, rate: float = 1.0) -> nn.Module:
    """The CNN of MaPP-FL (Figure 5) with u = 32 (400k)."""
    return mapp_cnn(32, input_shape, classes, rate)


@model("mapp-cnn-64", "mapp_fl")
def mapp_cnn_64(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, rate: float = 1.0) -> nn.Module:
    """The CNN of MaPP-FL (Figure 5) with u = 64 (1.6M)."""
    return mapp_cnn(64, input_shape, classes, rate)
