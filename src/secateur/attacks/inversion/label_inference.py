"""Label inference from an update, before the pictures are reconstructed.

All rules except `joint` and `oracle` read the gradient of the last layer. For cross-entropy dL/dz is p - onehot(y),
which is negative only at the labels. The bias gradient is its mean over the batch, and dW is its product with the
features. With `joint` labels are optimised together with the pictures.
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


def infer(
    rule: Rule,
    observed: Params,
    knowledge: Knowledge,
    target: int = 0,
    bounds: tuple[Params, Params] | None = None,
) -> tuple[Tensor | None, str | None]:
    """Return the labels (B,) of one target and a note about their source; the labels are None for `joint`.

    Labels that the attacker knows (`Knowledge.labels`) are used with every rule. An update may show `bounds` of the
    gradient. Then the signs of the bias show classes of a batch, and the sizes of the weights their numbers.
    """
    if knowledge.labels is not None:
        if knowledge.labels.ndim != 2 or knowledge.labels.shape[1] != knowledge.batch_size:
            shape, wanted = tuple(knowledge.labels.shape), f"(targets, {knowledge.batch_size})"
            raise WrongInput("labels", f"have shape {shape}; must be {wanted}")
        return knowledge.labels[target].to(next(iter(observed.values())).device), "labels: given"
    if rule == "joint":
        return None, "labels: optimised with the picture"
    if rule == "oracle":
        raise WrongInput("labels", "the rule oracle needs the true labels; pass them, or use another rule")
    weight, bias = last_layer(observed, knowledge)
    if bounds is not None and rule != "gi" and knowledge.batch_size > 1:
        low, high = (last_layer(part, knowledge)[0] for part in bounds)
        present = None if bias is None else bias < 0
        labels = counts(take_nearest(low, high), None, knowledge.batch_size, present)
        return labels, "labels: counts from the sizes that a step of Adam shows (estimated)"
    if rule == "bias":
        return _by_bias(weight, bias, knowledge)
    if rule == "gi":
        return _by_smallest(weight, knowledge)
    if rule == "idlg" and knowledge.batch_size == 1:
        return _by_rows(weight, bias)
    return counts(weight, bias, knowledge.batch_size), "labels: counts from magnitudes (estimated)"


def last_layer(observed: Params, knowledge: Knowledge) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the classifier's weight (K, D) and of its bias (K,), None without a bias."""
    name = classifier(knowledge.net, knowledge.classes)
    prefix = f"{name}." if name else ""
    if f"{prefix}weight" not in observed:
        frozen = f"{prefix}weight is frozen, so it is not in the update and labels cannot be read from it"
        raise WrongInput("labels", f"{frozen}; use labels=joint, or pass the labels")
    return observed[f"{prefix}weight"], observed.get(f"{prefix}bias")


def _by_rows(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, str]:
    """Return the class whose row of dW has the lowest sum (iDLG): exact for one example with non-negative features.

    Rows with entries of both signs show features of both signs; then the bias gradient decides. A zero in its
    gradient shows that it was pruned. Then, or without a bias, the label is the row that points away from all others:
    dW_y . dW_c <= 0 for every other c.
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
    """Return the classes with negative bias gradients: exact for one example.

    A class can occur more than once in a batch, so larger batches use `counts`.
    """
    if bias is None:
        raise WrongInput("labels", "the rule bias needs a last layer that has a bias; use idlg or joint")
    if knowledge.batch_size == 1:
        return bias.argmin().view(1), "labels: bias"
    return counts(weight, bias, knowledge.batch_size), "labels: bias, counts from magnitudes (estimated)"


def _by_smallest(weight: Tensor, knowledge: Knowledge) -> tuple[Tensor, str]:
    """Return the B classes with the smallest min_j dW[c, j] (GI, Yin et al. 2021, Eq. 7); no class occurs twice."""
    size = min(knowledge.batch_size, knowledge.classes)
    labels = weight.amin(1).topk(size, largest=False).indices.sort().values
    missing = knowledge.batch_size - size
    labels = torch.cat([labels, labels[:1].expand(missing)])
    return labels, "labels: GI's rule (never finds a class twice)" if knowledge.batch_size > 1 else "labels: GI's rule"


def take_nearest(low: Tensor, high: Tensor) -> Tensor:
    """Return the middle of bounds, or the finite one of them; 0 where none is.

    Example:
        >>> take_nearest(torch.tensor([1.0, 2.0, -torch.inf]), torch.tensor([3.0, torch.inf, -4.0]))
        tensor([ 2.,  2., -4.])
    """
    middle = (low + high) / 2
    return torch.where(middle.isfinite(), middle, torch.where(low.isfinite(), low, high)).nan_to_num(0, 0, 0)


def counts(weight: Tensor, bias: Tensor | None, size: int, present: Tensor | None = None) -> Tensor:
    """Return labels with repetition, (B,) in ascending order, from the negative evidence of each class.

    B times the class with the lowest evidence is selected, and the part of one example is added to its evidence. With
    a bias the evidence is dL/db = mean p - n_c / B, and the part of one example is 1 / B. This is exact if the mean
    probabilities of any two classes differ by less than 1 / B. Without a bias, or if it was pruned, the evidence is dW
    along its main direction. The part is then estimated from the classes that must be absent: their evidence is
    mean p, taken as 1 / K. Classes that are known to be `present` (K,) get one example each before that.
    """
    classes = weight.shape[0]
    if bias is not None and bool(bias.all()):  # a zero entry shows that the bias was pruned
        evidence, part = bias.clone(), bias.new_tensor(1 / size)
    else:
        evidence = _project_rows(weight, bias)
        absent = evidence.topk(max(1, classes - size)).values.mean()
        part = torch.maximum(absent * classes, -evidence.min()) / size
    labels = [] if present is None else list(present.nonzero().flatten()[:size])
    for label in labels:
        evidence[label] += part
    for _ in range(size - len(labels)):
        lowest = evidence.argmin()
        labels.append(lowest)
        evidence[lowest] += part
    return torch.stack(labels).sort().values


def _project_rows(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return dW along its main direction, (K,), with the sign that makes the labels negative.

    The sign comes from the remaining bias gradient, if any entry is left. Otherwise features that are nearly all of one
    sign are taken as non-negative. Otherwise the few classes that are labels are taken to be furthest from zero.
    """
    main = torch.linalg.svd(weight, full_matrices=False).Vh[0]
    evidence: Tensor = weight @ main
    vote = -evidence.min() - evidence.max()
    if bias is not None and bool(bias.any()):
        vote = evidence @ bias
    elif main.sum().abs() > main.abs().sum() / 2:
        vote = main.sum()
    return -evidence if vote < 0 else evidence


def labels_right(inferred: Tensor, truth: Tensor) -> int:
    """Return the number of correct labels: the size of the intersection of the two multisets.

    Example:
        >>> labels_right(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 3]))
        2
    """
    return (Counter(inferred.tolist()) & Counter(truth.tolist())).total()
