"""What each target is matched with: the observed gradients of its rounds, masks, labels; and targets as problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from secateur import tree
from secateur.attacks.inversion import adaptive
from secateur.attacks.inversion.labels import infer
from secateur.attacks.inversion.problem import Problem, structure
from secateur.attacks.inversion.updates import batchnorm_order, observed_gradient
from secateur.errors import WrongInput
from secateur.interfaces import Knowledge, Mask, Params, ServerView, Weights

if TYPE_CHECKING:
    from secateur.attacks.inversion.matching import GradientMatching


@dataclass(frozen=True, eq=False)
class Aim:
    """One target: what its trials are compared with, a round each."""

    index: int
    sent: Sequence[Params]
    observed: Sequence[Params]
    masks: Sequence[Mask] | None
    compression: adaptive.Compression | None
    labels: Tensor | None  # (B,); None: optimised
    steps: int  # local steps that are unrolled
    note: str


def aim_at(attack: GradientMatching, views: Sequence[ServerView], knowledge: Knowledge, index: int) -> Aim:
    """Read a target's updates as the attack does."""
    if not views:
        raise WrongInput("target", "has no update; give at least one round")
    observed = [observed_gradient(view, knowledge) for view in views]
    labels, note = infer(attack.labels, observed[0], knowledge, index)
    notes = [note] if note else []
    masks: list[Mask] | None = None
    compression = None
    if attack.target == "unpruned":
        found = [adaptive.unpruned(view) for view in views]
        observed = [o if mask is None else tree.masked(o, mask) for o, mask in zip(observed, found, strict=True)]
        if None in found:
            notes.append("a gradient shows no pruned weights: it is matched as it is")
    if attack.adaptive == "support":
        masks = [adaptive.support(one) for one in observed]
    elif attack.adaptive == "mask":
        masks = [adaptive.mask_again(view, one) for view, one in zip(views, observed, strict=True)]
        observed = [tree.masked(one, mask) for one, mask in zip(observed, masks, strict=True)]
    elif attack.adaptive == "layer":
        layer = attack.layer or adaptive.defended_layer(observed[0], knowledge.net, knowledge.classes)
        observed = [adaptive.without_layer(one, layer) for one in observed]
        if not observed[0]:
            raise WrongInput("adaptive", f"layer leaves nothing to match: {layer} is the only one; take another")
        notes.append(f"adaptive: the layer {layer} is left out of the matching")
    elif attack.adaptive == "reapply":
        compression, note = adaptive.compression_of(observed[0], knowledge)
        notes.append(note)
    if attack.batchnorm and knowledge.statistics is None and _fresh(views[0].sent):
        notes.append("BatchNorms that have seen no batch are left out of the prior")
    sent = [_tensors(view.sent, knowledge) for view in views]
    steps = knowledge.local_steps if isinstance(views[0].update, Weights) else 1
    return Aim(index, sent, observed, masks, compression, labels, steps, "; ".join(notes))


def grouped(aims: Sequence[Aim]) -> list[list[int]]:
    """Targets that can be stacked: as many rounds, the same names matched, the same compression and local steps."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, aim in enumerate(aims):
        key = (len(aim.observed), tuple(aim.observed[0]), aim.compression, aim.steps)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def problems(aims: Sequence[Aim], knowledge: Knowledge, restarts: int) -> list[tuple[Problem, Params]]:
    """The problem of every round and what stays fixed in it: the statistics that BatchNorms are expected to see."""
    net = structure(knowledge.net, knowledge.batchnorm).to(next(iter(aims[0].observed[0].values())).device)

    def stacked(trees: Sequence[Mapping[str, Tensor]]) -> Params:
        return {name: value.repeat_interleave(restarts, 0) for name, value in tree.stack(trees).items()}

    found = []
    for i in range(len(aims[0].observed)):
        sent = [aim.sent[i] for aim in aims]
        own = not all(_same(sent[0], other) for other in sent[1:])
        problem = Problem(
            net=net,
            sent=stacked(sent) if own else sent[0],
            observed=stacked([aim.observed[i] for aim in aims]),
            mask=None if aims[0].masks is None else stacked([aim.masks[i] for aim in aims if aim.masks]),
            own_weights=own,
            loss=knowledge.loss,
            steps=aims[0].steps,
            learning_rate=knowledge.learning_rate or 0.0,
            step_batch=knowledge.local_batch,
            compression=aims[0].compression,
        )
        found.append((problem, stacked([_statistics(aim, i, knowledge) for aim in aims])))
    return found


def _tensors(sent: Params, knowledge: Knowledge) -> Params:
    """All tensors that the structure asks for; buffers that are not saved come from the structure itself."""
    like = next(iter(sent.values()))
    own = {**dict(knowledge.net.named_parameters()), **dict(knowledge.net.named_buffers())}
    return {name: sent[name] if name in sent else value.detach().to(like.device) for name, value in own.items()}


def _same(a: Params, b: Params) -> bool:
    return a is b or all(a[name] is b[name] or torch.equal(a[name], b[name]) for name in a)


def _fresh(sent: Params) -> set[str]:
    """The BatchNorms whose running statistics are still those that they were made with."""
    tracked = ".num_batches_tracked"
    return {name.removesuffix(tracked) for name, value in sent.items() if name.endswith(tracked) and not value.any()}


def _statistics(aim: Aim, i: int, knowledge: Knowledge) -> Params:
    """The batch's own statistics where the attacker was told them, else the running ones of the sent model.

    Those of a BatchNorm that has seen no batch are of no data, and the attacker knows it: they are left out.
    """
    told = None if knowledge.statistics is None else knowledge.statistics[aim.index]
    found: Params = {}
    for place, name in enumerate(batchnorm_order(knowledge.net, aim.sent[i], knowledge.input_shape)):
        if told is None and name in _fresh(aim.sent[i]):
            continue
        for what, running in (("mean", "running_mean"), ("var", "running_var")):
            value = aim.sent[i].get(f"{name}.{running}") if told is None else told.get(f"{name}.{what}")
            if value is not None:
                found[f"batchnorm.{place}.{what}"] = value
    return found
