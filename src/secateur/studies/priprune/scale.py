"""Scales of priprune's studies, and the data sets and networks that stand for the paper's.

The paper's setting is one local step a round, 10 clients, learning rate .25, base rate .3 and 20 000 rounds. FEMNIST
has 193 users with Conv-2 in batches of 20; CIFAR-10 has 100 equal users with VGG-11 in batches of 1. The loss is not
printed. It is PruneFL's binary one, whose code the paper builds on and for which the rate of .25 was chosen. The server
attacks every rounds / 20; the rounds that the paper attacked are not printed either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from secateur.errors import WrongInput
from secateur.studies.study import laid_over

FEMNIST, CIFAR10 = "femnist", "cifar10"
BASE_RATE = 0.3  # of studies in which something else varies
FOUR = ("prunefl", "feddst", "synflow", "snip")  # base prunings of Table 2
# Fields of a scale that `--set` cannot change.
FIXED = ("places", "bases", "rates", "defense_rates", "grid", "search", "leaking")


@dataclass(frozen=True)
class Grid:
    """The base prunings, rates, batch sizes and networks of Figs. 2, 4 and 5; the defaults are the paper's."""

    places: dict[str, tuple[str, int]] = field(  # network and batch size if something else varies
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
    examples: int = 100  # of a client, for the covariance of gradients; the number decides d*


@dataclass(frozen=True)
class StandIn:
    """The data set and network that stand for those of the paper."""

    data: str
    model: str
    batch_size: int
    clients: int | None = None  # None: one a writer


@dataclass(frozen=True)
class PripruneScale:
    """The size of a study; the defaults are the paper's setting. MNIST by writer stands for FEMNIST."""

    places: dict[str, StandIn] = field(
        default_factory=lambda: {
            FEMNIST: StandIn("qmnist", "conv-2", 20),
            CIFAR10: StandIn("cifar10", "vgg-11", 1, 100),
        }
    )
    rounds: int = 20_000
    attacked: int = 20  # rounds
    victims: int = 1  # clients that are attacked in such a round
    brief_rounds: int = 1000  # of studies that only attack, by pruning rate; the paper does not say after how many
    brief_attacked: int = 2
    brief_victims: int = 5
    per_round: int = 10
    batch_size: int | None = None  # of a local step; None: the paper's for its data
    learning_rate: float = 0.25
    coverage: bool = False  # average over clients that sent an entry; in the paper a withheld 0 counts
    iterations: int = 10_000  # of gi and sgi
    attack_rate: float = 0.01
    evaluated: int = 40  # rounds
    examples: int | None = None  # at most so many rows of the data set
    writers: int = 193  # at most so many of the train part; every client of PriPrune has a state
    threads: int = 1
    bases: dict[str, str] = field(default_factory=dict)  # settings of base prunings that suit fewer rounds
    rates: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)  # of base prunings
    defense_rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    grid: tuple[tuple[float, ...], ...] = ((1, 5, 10), (1, 10, 15), (2e-4, 2e-5, 2e-6))  # Table A1's lambdas
    search: tuple[str, ...] = FOUR  # base prunings of studies by base
    leaking: Grid = field(default_factory=Grid)  # of Figs. 2, 4 and 5


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
TINY = PripruneScale(
    places={FEMNIST: StandIn("digits", "lenet-zhu", 4, 8), CIFAR10: StandIn("digits", "cnn6", 2, 8)},
    rounds=4,
    attacked=2,
    brief_rounds=2,
    brief_attacked=2,
    brief_victims=1,
    per_round=2,
    iterations=4,
    attack_rate=0.1,
    evaluated=4,
    examples=400,
    bases={"prunefl": "every=2:iterations=4:samples=20", "feddst": "every=2", "random": "every=2"},
    rates=(0.3, 0.9),
    defense_rates=(0.1, 0.6),
    grid=((5,), (1, 15), (2e-4, 2e-6)),
    search=("prunefl", "snip"),
    leaking=TINY_GRID,
)
SMALL = PripruneScale(
    places={FEMNIST: StandIn("qmnist", "conv-2", 20), CIFAR10: StandIn("cifar10", "vgg-4", 10, 100)},
    rounds=30,
    attacked=3,
    brief_rounds=4,
    brief_attacked=2,
    brief_victims=1,
    iterations=80,
    attack_rate=0.1,
    evaluated=3,
    examples=30_000,
    writers=20,
    threads=2,
    bases={"prunefl": "every=10:iterations=60", "feddst": "every=5", "random": "every=10"},
    rates=(0.3, 0.6, 0.9),
    defense_rates=(0.1, 0.3, 0.6),
    grid=((1, 10), (1, 15), (2e-4, 2e-6)),
    leaking=SMALL_GRID,
)
SCALES = {"tiny": TINY, "small": SMALL, "full": PripruneScale()}


def scale_of(name: str, overrides: list[str] | None) -> PripruneScale:
    """Return a scale by its name, with `field=value` laid over it."""
    scale = laid_over(SCALES, name, overrides, FIXED)
    for rounds, attacked in ((scale.rounds, scale.attacked), (scale.brief_rounds, scale.brief_attacked)):
        if attacked > rounds:
            raise WrongInput("set", f"{attacked} attacked rounds are not possible; there are {rounds} rounds")
    return scale
