"""The figures and tables of "Membership Inference Attacks and Defenses in Neural Network Pruning" (samia_ppb).

Each study is an audit and a table; studies that differ only in data set or network share their table. Data sets and
networks in the summaries are the paper's. `--data` and `--model` select the paper's other panels.
"""

from __future__ import annotations

from secateur.catalogue import method
from secateur.studies.samia.attacks import compared, gaps, risk_by_accuracy, risk_by_sparsity, unknown, unknown_sparsity
from secateur.studies.samia.behaviour import by_class, by_class_defended, histograms, histograms_defended, utility
from secateur.studies.samia.defenses import adaptive, non_adaptive
from secateur.studies.study import ONE, SCALES, Study

SIZES = tuple(SCALES)
PAPER = "samia_ppb"
MAIN = ("conf", "mentr", "top1-conf", "nn-cls", "blindmi", "samia")
DEFENSES = ("basic", "ppb", "adv", "dp-sgd")
PPB = ("basic", "ppb:strength=4")
DENSE = "densenet121"


@method("study", "samia-fig1", PAPER, scales=SIZES)
def fig1() -> Study:
    """Confidence and sensitivity of members and others before and after pruning (samia_ppb, Fig. 1)."""
    return Study(histograms, DENSE, ONE, 0.7, ("conf",), shadows=1)


@method("study", "samia-fig4", PAPER, scales=SIZES)
def fig4() -> Study:
    """Divergence of confidence and sensitivity by class before and after pruning (samia_ppb, Fig. 4)."""
    return Study(by_class, DENSE, ONE, 0.7, ("conf",), shadows=1)


@method("study", "samia-fig6", PAPER, scales=SIZES)
def fig6() -> Study:
    """Prediction accuracy by pruner and sparsity, beside the original's (samia_ppb, Fig. 6)."""
    return Study(utility, attack=("conf",), shadows=1)


@method("study", "samia-fig7", PAPER, scales=SIZES)
def fig7() -> Study:
    """Attack accuracy against prediction accuracy, pruned and original (samia_ppb, Fig. 7)."""
    return Study(risk_by_accuracy)


@method("study", "samia-fig8", PAPER, scales=SIZES)
def fig8() -> Study:
    """Attack accuracy against sparsity, pruned and original (samia_ppb, Fig. 8)."""
    return Study(risk_by_sparsity)


@method("study", "samia-fig9", PAPER, scales=SIZES)
def fig9() -> Study:
    """Confidence, sensitivity and generalisation gap against attack accuracy (samia_ppb, Fig. 9)."""
    return Study(gaps)


@method("study", "samia-fig10", PAPER, scales=SIZES)
def fig10() -> Study:
    """Attacks compared on four pruners, CIFAR10 and ResNet18 (samia_ppb, Fig. 10)."""
    return Study(compared, attack=MAIN)


@method("study", "samia-fig11", PAPER, scales=SIZES)
def fig11() -> Study:
    """Attacks compared on data sets, L1 unstructured, DenseNet121 or the MLP (samia_ppb, Fig. 11)."""
    return Study(compared, DENSE, ONE, attack=MAIN)


@method("study", "samia-fig12", PAPER, scales=SIZES)
def fig12() -> Study:
    """Attack accuracy when the sparsity is guessed, CIFAR10 and ResNet18 (samia_ppb, Fig. 12)."""
    return Study(unknown_sparsity, attack=("samia",), protocol="unknown-sparsity")


@method("study", "samia-fig13", PAPER, scales=SIZES)
def fig13() -> Study:
    """Attack accuracy when the sparsity is guessed, by data set, L1 unstructured (samia_ppb, Fig. 13)."""
    return Study(unknown_sparsity, DENSE, ONE, attack=("samia",), protocol="unknown-sparsity")


@method("study", "samia-fig14", PAPER, scales=SIZES)
def fig14() -> Study:
    """Confidence and sensitivity of members and others with PPB, beside Fig. 1 (samia_ppb, Fig. 14)."""
    return Study(histograms_defended, DENSE, ONE, 0.7, ("conf",), PPB, shadows=1)


@method("study", "samia-fig15", PAPER, scales=SIZES)
def fig15() -> Study:
    """Divergence of confidence and sensitivity by class with PPB, beside Fig. 4 (samia_ppb, Fig. 15)."""
    return Study(by_class_defended, DENSE, ONE, 0.7, ("conf",), PPB, shadows=1)


@method("study", "samia-fig16", PAPER, scales=SIZES)
def fig16() -> Study:
    """Defenses for four pruners, the attacker not knowing them, CIFAR10 and ResNet18 (samia_ppb, Fig. 16)."""
    return Study(non_adaptive, sparsity=0.6, defense=DEFENSES)


@method("study", "samia-fig17", PAPER, scales=SIZES)
def fig17() -> Study:
    """Defenses by data set, the attacker not knowing them, L1 unstructured (samia_ppb, Fig. 17)."""
    return Study(non_adaptive, DENSE, ONE, 0.6, defense=DEFENSES)


@method("study", "samia-fig18", PAPER, scales=SIZES)
def fig18() -> Study:
    """Defenses for four pruners against adaptive attacks, CIFAR10 and ResNet18 (samia_ppb, Fig. 18)."""
    return Study(adaptive, sparsity=0.6, defense=DEFENSES, adaptive=True)


@method("study", "samia-fig19", PAPER, scales=SIZES)
def fig19() -> Study:
    """Defenses by data set against adaptive attacks, L1 unstructured (samia_ppb, Fig. 19)."""
    return Study(adaptive, DENSE, ONE, 0.6, defense=DEFENSES, adaptive=True)


@method("study", "samia-table1", PAPER, scales=SIZES)
def table1() -> Study:
    """Attack accuracy lost when pruner and sparsity are unknown, in random experiments (samia_ppb, Table 1)."""
    return Study(unknown, attack=("samia",), protocol="unknown")
