"""Rows and figures as an audit writes them, with numbers that are easy to follow."""

from dataclasses import replace
from itertools import product

from secateur.runs.rows import Row

MODELS = [("none", 0.0, "basic"), *product(("l1-unstructured", "l1-structured"), (0.5, 0.9), ("basic", "ppb"))]


def model_rows(labels, seed, accuracy):
    labels = labels | {"seed": seed}
    yield Row(**labels, metric="test_accuracy", value=accuracy, low=accuracy - 0.02, high=accuracy + 0.02)
    yield Row(**labels, metric="train_accuracy", value=1.0, low=0.99, high=1.0)
    yield Row(**labels, metric="confidence_gap", value=0.05, low=0.02, high=0.08)
    yield Row(**labels, metric="bytes_masked", value=106272)
    yield Row(**labels, metric="seconds_masked", value=0.0012, timing=True)


def attack_rows(labels, seed, auc):
    labels = labels | {"seed": seed}
    note = "not supported by the sample"
    yield Row(**labels, metric="auc", value=auc, low=auc - 0.03, high=auc + 0.03)
    yield Row(**labels, metric="tpr_at_fpr_0.001", value=0.0, low=0.0, high=0.01, note=note)


def labels_of(pruner, sparsity, defense, **more):
    common = {"model": "digits-cnn", "dataset": "digits", "adaptive": False}
    return common | {"pruner": pruner, "sparsity": sparsity, "defense": defense} | more


def audit_rows(attacks=("conf", "samia"), seeds=(0,)):
    """An original and eight pruned models; each is a little less accurate and leaks a little more than the last."""
    rows = []
    for seed in seeds:
        for number, model in enumerate(MODELS):
            labels = labels_of(*model)
            rows += model_rows(labels, seed, 0.95 - 0.01 * number)
            for rank, attack in enumerate(attacks):
                rows += attack_rows(labels | {"attack": attack}, seed, 0.55 + 0.02 * number + 0.005 * rank)
    return rows


def know_defense(rows):
    """The rows of an attacker whose shadow models have the defense too."""
    return [replace(row, adaptive=True) if row.pruner != "none" else row for row in rows]


def figures_of(rows, classes=10):
    """The figures that belong to these rows."""
    figures, seen = [], set()
    for row in rows:
        names = ("model", "dataset", "pruner", "sparsity", "defense", "adaptive", "attack", "seed")
        labels = {"schema": 1} | {name: getattr(row, name) for name in names} | row.extra
        if (key := tuple(labels.items())) in seen:
            continue
        seen.add(key)
        figures += [labels | curve()] if row.attack else [labels | figure for figure in portrait(classes, row.sparsity)]
    return figures


def curve():
    return {"kind": "roc", "fpr": [0.0, 0.0, 0.005, 0.1, 1.0], "tpr": [0.0, 0.01, 0.02, 0.3, 1.0]}


def portrait(classes, sparsity):
    for quantity in ("confidence", "sensitivity"):
        top = 1.0 if quantity == "confidence" else 0.2 + sparsity
        yield {
            "kind": "histogram",
            "quantity": quantity,
            "edges": [0.0, top / 2, top],
            "members": [0.1, 0.9],
            "nonmembers": [0.4, 0.6],
            "member_mean": 0.7 * top,
            "nonmember_mean": 0.55 * top,
        }
    for quantity in ("confidence", "sensitivity", "accuracy"):
        members, others = [0.9] * classes, [0.8] * (classes - 1) + [None]
        yield {"kind": "classes", "quantity": quantity, "members": members, "nonmembers": others}
