"""What Figs. 2, 4 and 5 of priprune let vary, by the paper's data set."""

from __future__ import annotations

from dataclasses import dataclass, field

FEMNIST, CIFAR10 = "femnist", "cifar10"
BASE_RATE = 0.3  # where something else varies


@dataclass(frozen=True)
class Grid:
    """Which base prunings, rates, batch sizes and networks; the defaults are the paper's."""

    places: dict[str, tuple[str, int]] = field(  # network and batch size where something else varies
        default_factory=lambda: {FEMNIST: ("conv-2", 20), CIFAR10: ("vgg-11", 1)}
    )
    bases: tuple[str, ...] = ("random", "snip", "synflow", "feddst", "prunefl", "grasp")
    rates: dict[str, tuple[float, ...]] = field(
        default_factory=lambda: {
            FEMNIST: (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
            CIFAR10: (0.1, 0.3, 0.5, 0.7, 0.9),
        }
    )
    batches: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {FEMNIST: (1, 16, 20, 32, 64), CIFAR10: (1, 8, 16, 32)}
    )
    networks: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            FEMNIST: ("conv-1", "conv-2", "conv-4", "conv-6"),
            CIFAR10: ("vgg-4", "vgg-6", "vgg-9", "vgg-11"),
        }
    )
    examples: int = 100  # of a client, whose gradients the covariance is of; it decides d*


TINY_GRID = Grid(
    places={FEMNIST: ("conv-2", 4), CIFAR10: ("conv-1", 2)},
    bases=("random", "snip", "prunefl"),
    rates={FEMNIST: (0.3, 0.9), CIFAR10: (0.3, 0.9)},
    batches={FEMNIST: (1, 4), CIFAR10: (1, 2)},
    networks={FEMNIST: ("conv-1", "conv-2"), CIFAR10: ("conv-1", "vgg-4")},
    examples=8,
)
SMALL_GRID = Grid(
    places={FEMNIST: ("conv-1", 4), CIFAR10: ("vgg-4", 1)},
    rates={FEMNIST: (0.1, 0.3, 0.5, 0.7, 0.9), CIFAR10: (0.1, 0.5, 0.9)},
    batches={FEMNIST: (1, 4, 16), CIFAR10: (1, 4, 8)},
    networks={FEMNIST: ("conv-1", "conv-2"), CIFAR10: ("vgg-4", "vgg-6")},
    examples=24,
)
