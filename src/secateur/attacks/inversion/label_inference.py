"""The labels of an update, recovered on their own: before any picture, or together with it.

All rules but `joint` and `oracle` read the last layer's gradient: for cross-entropy dL/dz is p - onehot(y), so it is
negative at the labels alone, the bias gradient is its mean over the batch, and dW is its product with the features.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from secateur.errors import WrongInput
from secateur.functional import classifier
from secateur.interfaces import Knowledge, Params

Rule = Literal["idlg", "bias", "gi", "counts", "joint", "oracle"]


def infer(rule: Rule, observed: Params, knowledge: Knowledge, target: int = 0) -> tuple[Tensor | None, str | None]:
    """The labels (B,) of one target and what a reader must know of them; None where they are optimised (joint).

    Labels that the attacker was given (`Knowledge.labels`) are taken, whatever the rule.
    """
    if knowledge.labels is not None:
        if knowledge.labels.ndim != 2 or knowledge.labels.shape[1] != knowledge.batch_size:
            wanted = f"(targets, {knowledge.batch_size})"
            raise WrongInput("labels", f"have shape {tuple(knowledge.labels.shape)}; give a row a target, {wanted}")
        return knowledge.labels[target].to(next(iter(observed.values())).device), "labels: given"
    if rule == "joint":
        return None, "labels: optimised with the picture"
    if rule == "oracle":
        raise WrongInput("labels", "the rule oracle needs the true labels; give them, or take another rule")
    weight, bias = last_layer(observed, knowledge)
    if rule == "bias":
        return _by_bias(weight, bias, knowledge)
    if rule == "gi":
        return _by_smallest(weight, knowledge)
    if rule == "idlg" and knowledge.batch_size == 1:
        return _by_rows(weight, bias)
    return counts(weight, bias, knowledge.batch_size), "labels: counts from magnitudes (estimated)"


def last_layer(observed: Params, knowledge: Knowledge) -> tuple[Tensor, Tensor | None]:
    """The gradient of the classifier's weight (K, D) and of its bias (K,), if it has one."""
    name = classifier(knowledge.net, knowledge.classes)
    prefix = f"{name}." if name else ""
    if f"{prefix}weight" not in observed:
        frozen = f"{prefix}weight is frozen, so it is not in the update and labels cannot be read from it"
        raise WrongInput("labels", f"{frozen}; optimise them with the picture (labels: joint) or give them")
    return observed[f"{prefix}weight"], observed.get(f"{prefix}bias")


def _by_rows(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, str]:
    """iDLG: the class whose row of dW sums lowest; exact for one example whose features are all non-negative.

    Features of both signs show in rows of both signs. Then the bias decides; where there is none, or a zero in it shows
    that it was pruned, the row that points away from all others (dW_y . dW_c <= 0 for every other c).
    """
    one_sign = bool((((weight >= 0).all(1)) | ((weight <= 0).all(1))).all())
    if one_sign:
        return weight.sum(1).argmin().view(1), "labels: iDLG, row sums"
    if bias is not None and bool(bias.all()):
        return bias.argmin().view(1), "labels: iDLG, bias (features of both signs)"
    products = weight @ weight.T
    return (products.sum(1) - products.diagonal()).argmin().view(
        1
    ), "labels: iDLG, opposed rows (features of both signs, no whole bias)"


def _by_bias(weight: Tensor, bias: Tensor | None, knowledge: Knowledge) -> tuple[Tensor, str]:
    """The negative entries of the bias gradient; exact for one example.

    A class may be there more than once, so what is left of B is shared out by `counts`.
    """
    if bias is None:
        raise WrongInput("labels", "the rule bias needs a last layer that has a bias; take idlg or joint")
    if knowledge.batch_size == 1:
        return bias.argmin().view(1), "labels: bias"
    return counts(weight, bias, knowledge.batch_size), "labels: bias, counts from magnitudes (estimated)"


def _by_smallest(weight: Tensor, knowledge: Knowledge) -> tuple[Tensor, str]:
    """GI (Yin et al. 2021, Eq. 7): the B classes with the smallest min_j dW[c, j]. It cannot say a class twice."""
    size = min(knowledge.batch_size, knowledge.classes)
    found = weight.amin(1).topk(size, largest=False).indices.sort().values
    missing = knowledge.batch_size - size
    found = torch.cat([found, found[:1].expand(missing)])
    return found, "labels: GI's rule (never finds a class twice)" if knowledge.batch_size > 1 else "labels: GI's rule"


def counts(weight: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """Labels with repetition, (B,) in ascending order, from how negative each class is.

    The lowest class is taken, one example's part is added to it, and so on B times. With a bias the evidence is
    dL/db = mean p - n_c / B, so one example's part is 1 / B: exact where the mean probabilities of any two classes
    differ by less than 1 / B. Without one, or where it was pruned, the evidence is dW along its main direction, and
    the part is estimated from the classes that must be absent, for which it is mean p, taken as 1 / K.
    """
    classes = weight.shape[0]
    if bias is not None and bool(bias.all()):  # a zero among them is the trace of pruning
        evidence, part = bias.clone(), bias.new_tensor(1 / size)
    else:
        evidence = _along_features(weight, bias)
        absent = evidence.topk(max(1, classes - size)).values.mean()
        part = torch.maximum(absent * classes, -evidence.min()) / size
    found = []
    for _ in range(size):
        lowest = evidence.argmin()
        found.append(lowest)
        evidence[lowest] += part
    return torch.stack(found).sort().values


def _along_features(weight: Tensor, bias: Tensor | None) -> Tensor:
    """(K,): dW along its main direction, turned so that labels are negative.

    Which way that is says what is left of the bias gradient, else features that are nearly all of one sign (they are
    then non-negative), else that few classes are labels and so lie furthest from zero.
    """
    main = torch.linalg.svd(weight, full_matrices=False).Vh[0]
    evidence: Tensor = weight @ main
    vote = -evidence.min() - evidence.max()
    if bias is not None and bool(bias.any()):
        vote = evidence @ bias
    elif main.sum().abs() > main.abs().sum() / 2:
        vote = main.sum()
    return -evidence if vote < 0 else evidence


def labels_right(found: Tensor, truth: Tensor) -> int:
    """How many of the true labels were found, each as often as it is there: the overlap of multisets.

    Example:
        >>> labels_right(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 3]))
        2
    """
    return (Counter(found.tolist()) & Counter(truth.tolist())).total()
