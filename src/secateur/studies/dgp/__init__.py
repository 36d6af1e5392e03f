"""The figures and tables of "Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks".

Each study is a sequence of steps and a table. Networks and data sets are the paper's. At smaller scales others stand
in for them (scale.py), and the table names them.
"""

from __future__ import annotations

from secateur.catalogue import method
from secateur.studies.dgp import (
    accuracy_tables,
    bounds,
    cost,
    distance,
    membership_step,
    privacy_tables,
    residual_steps,
)
from secateur.studies.dgp.attack_step import Attacked
from secateur.studies.dgp.bounds import Bounded
from secateur.studies.dgp.cost import Costed
from secateur.studies.dgp.distance import Distanced
from secateur.studies.dgp.membership_step import Members
from secateur.studies.dgp.residual_steps import Midway, Overheard, Silence
from secateur.studies.dgp.runner import UpdateStudy
from secateur.studies.dgp.scale import CIFAR100, NETWORKS, SCALES
from secateur.studies.dgp.training_step import TrainingStep

SIZES = tuple(SCALES)
PAPER = "dgp"
BATCH = 9  # the batch size attacked by Rob
DEFENSES = ("none", "ats", "soteria", "precode", "noise", "top-k", "outpost", "dgp")
TOP_K, DGP, ADGP = (f"{name}+error-feedback" for name in ("top-k", "dgp", "adgp"))
TRAINED = ("none", "ats", "soteria", "precode", "noise", TOP_K, "outpost", DGP)
TOTALS = tuple(f"dgp:k1={k1:g}:k2={k2:g}" for k1, k2 in ((0.03, 0.45), (0.05, 0.75), (0.06, 0.9)))
RATIOS = tuple(f"dgp:k1={k1:g}:k2={k2:g}" for k1, k2 in ((0.05, 0.75), (0.1, 0.7), (0.2, 0.6)))
FOLLOWER = "adgp:chosen=false"  # a user that uses the positions broadcast by another user
HARD_TOP_K = "top-k:keep=0.05"
NEAR_TO_FAR = ("none", "top-k:keep=0.5", "top-k", HARD_TOP_K, "dgp:k1=0.01:k2=0.79", *RATIOS, "noise")


@method("study", "dgp-table1", PAPER, scales=SIZES)
def table1() -> UpdateStudy:
    """Four attacks on eight defenses, plain and adaptive, and the final accuracy (dgp, Table 1)."""
    steps = (
        Attacked("r-gap", DEFENSES, "cnn6"),
        Attacked("ig", DEFENSES),
        Attacked("ig", ("none", "top-k", "dgp"), labels="oracle", adaptive=()),
        Attacked("gi", DEFENSES),
        Attacked("rob", DEFENSES, batch_size=BATCH),
        TrainingStep(TRAINED),
    )
    return UpdateStudy(accuracy_tables.table1, steps)


@method("study", "dgp-table2", PAPER, scales=SIZES)
def table2() -> UpdateStudy:
    """DGP by k1 + k2 under Rob and by p = k1 / k2 under IG, and its accuracy (dgp, Table 2)."""
    with_feedback = tuple(f"{defense}+error-feedback" for defense in dict.fromkeys((*TOTALS, *RATIOS)))
    steps = (Attacked("rob", TOTALS, batch_size=BATCH), Attacked("ig", RATIOS), TrainingStep(with_feedback))
    return UpdateStudy(accuracy_tables.table2_both, steps)


@method("study", "dgp-table3", PAPER, scales=SIZES)
def table3() -> UpdateStudy:
    """Bytes of one upload and one download, four networks (dgp, Table 3)."""
    return UpdateStudy(cost.table3, _costs(), "Bytes are counted, not estimated.")


@method("study", "dgp-table4", PAPER, scales=SIZES)
def table4() -> UpdateStudy:
    """Seconds that the defenses take in an epoch, four networks (dgp, Table 4)."""
    return UpdateStudy(cost.table4, _costs(), "Medians; in brackets the fastest and the slowest call, on this machine.")


@method("study", "dgp-table5", PAPER, scales=SIZES)
def table5() -> UpdateStudy:
    """Rob and IG on four networks with and without DGP, CIFAR-10 (dgp, Table 5)."""
    return UpdateStudy(privacy_tables.table5, _on_networks())


@method("study", "dgp-table6", PAPER, scales=SIZES)
def table6() -> UpdateStudy:
    """Rob and IG on four networks with and without DGP, CIFAR-100 (dgp, Table 6)."""
    return UpdateStudy(privacy_tables.table6, _on_networks(CIFAR100))


@method("study", "dgp-table7", PAPER, scales=SIZES)
def table7() -> UpdateStudy:
    """Accuracy of Top-k at 95 % and of DGP at 80 %, four networks, CIFAR-100 (dgp, Table 7)."""
    both = (f"{HARD_TOP_K}+error-feedback", DGP)
    return UpdateStudy(accuracy_tables.table7, tuple(TrainingStep(both, model, CIFAR100) for model in NETWORKS))


@method("study", "dgp-fig1", PAPER, scales=SIZES)
def fig1() -> UpdateStudy:
    """Recovery by IG against the relative distance of the upload, and Proposition 1 (dgp, Fig. 1)."""
    return UpdateStudy(distance.fig1, (Distanced(NEAR_TO_FAR),))


@method("study", "dgp-fig2", PAPER, scales=SIZES)
def fig2() -> UpdateStudy:
    """Top-k against DGP: what IG recovers, and the accuracy over the epochs (dgp, Fig. 2)."""
    return UpdateStudy(
        accuracy_tables.fig2, (Attacked("ig", ("none", "top-k", "dgp")), TrainingStep(("none", TOP_K, DGP)))
    )


@method("study", "dgp-fig3", PAPER, scales=SIZES)
def fig3() -> UpdateStudy:
    """Pictures by defense under four attacks (dgp, Fig. 3)."""
    steps = (
        Attacked("ig", DEFENSES, adaptive=()),
        Attacked("gi", DEFENSES, adaptive=()),
        Attacked("r-gap", DEFENSES, "cnn6", adaptive=()),
        Attacked("rob", DEFENSES, batch_size=BATCH, adaptive=()),
    )
    return UpdateStudy(privacy_tables.table1, steps)


@method("study", "dgp-fig4", PAPER, scales=SIZES)
def fig4() -> UpdateStudy:
    """Accuracy with and without error feedback, four networks, two data sets (dgp, Fig. 4)."""
    four = ("none", DGP, "dgp", ADGP)
    steps = [TrainingStep(four, model) for model in NETWORKS] + [
        TrainingStep(four, model, CIFAR100) for model in NETWORKS
    ]
    return UpdateStudy(accuracy_tables.fig4, tuple(steps))


@method("study", "dgp-fig5", PAPER, scales=SIZES)
def fig5() -> UpdateStudy:
    """Pictures under GGL, with a generator that the run itself trains on CIFAR-10 (dgp, Fig. 5, on ImageNet)."""
    return UpdateStudy(privacy_tables.gallery, (Attacked("ggl", DEFENSES),))


@method("study", "dgp-fig6", PAPER, scales=SIZES)
def fig6() -> UpdateStudy:
    """Pictures under IG, Top-k at 80 and 95 % and DGP, CIFAR-100 (dgp, Fig. 6)."""
    defenses = ("none", "top-k", HARD_TOP_K, "dgp")
    return UpdateStudy(privacy_tables.gallery, (Attacked("ig", defenses, data=CIFAR100),))


@method("study", "dgp-fig7", PAPER, scales=SIZES)
def fig7() -> UpdateStudy:
    """Pictures under Rob, Top-k at 80 and 95 % and DGP, CIFAR-100 (dgp, Fig. 7)."""
    defenses = ("none", "top-k", HARD_TOP_K, "dgp")
    return UpdateStudy(privacy_tables.gallery, (Attacked("rob", defenses, data=CIFAR100, batch_size=BATCH),))


@method("study", "dgp-fig8", PAPER, scales=SIZES)
def fig8() -> UpdateStudy:
    """Pictures under IG of batches of two and of four (dgp, Fig. 8)."""
    return UpdateStudy(
        privacy_tables.gallery, tuple(Attacked("ig", DEFENSES, batch_size=size, adaptive=()) for size in (2, 4))
    )


@method("study", "dgp-fig9", PAPER, scales=SIZES)
def fig9() -> UpdateStudy:
    """Pictures under Rob of batches of 4, 9 and 16, sizes that the paper does not print (dgp, Fig. 9)."""
    sizes = (4, BATCH, 16)
    return UpdateStudy(privacy_tables.gallery, tuple(Attacked("rob", DEFENSES, batch_size=size) for size in sizes))


@method("study", "dgp-adgp", PAPER, scales=SIZES)
def adgp() -> UpdateStudy:
    """ADGP beside DGP: the user that broadcasts and one that follows, and who only listens (dgp 6.4, future work)."""
    four = ("none", "dgp", "adgp", FOLLOWER)
    steps = (
        Attacked("r-gap", four, "cnn6"),
        Attacked("ig", four),
        Attacked("gi", four),
        Attacked("rob", four, batch_size=BATCH),
        Overheard("adgp"),
        TrainingStep(("none", DGP, ADGP)),
        TrainingStep((ADGP,), liar=Silence()),
    )
    return UpdateStudy(residual_steps.aligned, steps)


@method("study", "dgp-residual", PAPER, scales=SIZES)
def residual() -> UpdateStudy:
    """IG on updates with an empty and with a trained residual, and what error feedback holds back (not in dgp)."""
    defenses = (DGP, "dgp:release=10+error-feedback", TOP_K)
    return UpdateStudy(residual_steps.residual, (Attacked("ig", ("none", "dgp")), Midway(defenses)))


@method("study", "dgp-convergence", PAPER, scales=SIZES)
def convergence() -> UpdateStudy:
    """Lemma 1 and Theorem 2 on a training by plain SGD, under error feedback (dgp Section 5)."""
    defenses = ("none", TOP_K, DGP, "dgp:release=10+error-feedback")
    intervals = "One run is what it is: there are no intervals; K is the largest met, so bounds are flattered."
    return UpdateStudy(bounds.convergence, (Bounded(defenses),), intervals)


@method("study", "dgp-membership", PAPER, scales=SIZES)
def membership() -> UpdateStudy:
    """Membership inference on the model trained under every defense of updates (not in dgp)."""
    return UpdateStudy(membership_step.membership, (Members((*TRAINED, ADGP, "dp")),))


def _costs() -> tuple[Costed, ...]:
    """Return steps for all defenses on stand-in networks, and for pruning defenses on the paper's large networks."""
    large = [Costed(("none", "top-k", "dgp", "adgp"), model, exact=True) for model in ("resnet18", "vgg11-bn")]
    return (*(Costed((*DEFENSES, "adgp", "dp"), model) for model in NETWORKS), *large)


def _on_networks(data: str = "cifar10") -> tuple[Attacked, ...]:
    both = ("none", "dgp")
    rob = [Attacked("rob", both, model, data, BATCH) for model in NETWORKS]
    return (*rob, *(Attacked("ig", both, model, data) for model in NETWORKS))
