"""Gradient matching: the search for pictures whose gradient is the one that was sent.

The presets (dlg.py, ig.py, gi.py, sgi.py) are this class with their sources' numbers as defaults. `aim_at` reads a
target: the observed gradients of its rounds, masks and labels. `problems` turns stacked targets into problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor

from secateur import tree
from secateur.attacks.inversion import adaptive
from secateur.attacks.inversion.adaptive import Adaptive
from secateur.attacks.inversion.engines import choose, engine_for
from secateur.attacks.inversion.label_inference import Rule, infer
from secateur.attacks.inversion.optimisation import (
    LBFGS,
    AdamRule,
    Schedule,
    SharedBar,
    StepRule,
    Trials,
    learning_rates,
    smoothing_deviations,
)
from secateur.attacks.inversion.problem import (
    Bounds,
    Distance,
    Matching,
    NaturalBasis,
    Problem,
    natural_basis,
    structure,
)
from secateur.attacks.inversion.updates import ObservedChange, batchnorm_order, read_change, read_statistics
from secateur.errors import WrongInput, check_number, check_numbers, check_whole, check_wholes
from secateur.gpu.memory import halve_on_shortage
from secateur.interfaces import (
    PLAIN_SGD,
    Batch,
    InversionAttack,
    Knowledge,
    Mask,
    Params,
    Reconstruction,
    ServerView,
    Watch,
    Weights,
)
from secateur.seeding import draw_seed
from secateur.training.optimisers import LocalSteps


@dataclass(frozen=True, eq=False)
class MatchingTarget:
    """One target as the attack reads it: the sent model and the observed gradient of each round, masks and labels."""

    index: int
    sent: Sequence[Params]
    observed: Sequence[Params]
    masks: Sequence[Mask] | None
    unsigned: Sequence[Mask] | None
    compression: adaptive.Compression | None
    labels: Tensor | None  # (B,); None: optimised
    turn: LocalSteps  # unrolled
    bounds: Sequence[Bounds] | None  # of the gradient of each round, if the updates show no more
    statistics: Sequence[Params | None]  # of the BatchNorm inputs of each round, if the attacker knows them
    note: str


@dataclass(frozen=True)
class GradientMatching(InversionAttack):
    """The attack: minimise scale * D(g, g*) + priors over the pictures of all targets and restarts at once."""

    iterations: int = 2500
    learning_rate: float = 0.1
    restarts: int = 1
    distance: Distance = "cosine"
    scale: float = 1.0  # a_G
    tv: float = 0.0  # a_TV
    tv_average: bool = False  # half the sum of mean|dx| and mean|dy| instead of their sum
    l2: float = 0.0  # a_l2
    batchnorm: float = 0.0  # a_BN
    first_batchnorm: float = 10.0
    group: float = 0.0  # a_group
    smoothing: float = 0.0  # deviation of the noise on pixels at which the objective is taken, at the start
    natural: float = 0.0  # a_N; above 0 the search is in the coordinates of natural pictures
    registers: bool = False  # True: restarts are aligned to their mean before the consensus
    labels: Rule = "idlg"
    optimizer: Literal["adam", "lbfgs"] = "adam"
    sign: bool = False
    schedule: Schedule = "constant"
    noise: float = 0.0  # of the pixels in a step, times the learning rate
    box: bool = True
    target: Literal["update", "unpruned"] = "update"  # unpruned: SGI's mask from the received weights
    adaptive: Adaptive = "none"
    layer: str | None = None  # left out by adaptive=layer; None: the layer with the most zeros
    follows: bool = False  # True: entries that the client did not send the last time are left out
    unrolls: bool = True  # False: weights are taken as one step of plain gradient descent on all examples
    softness: float = 0.03  # of steps of Adam, as a share of the mean |g|: Adam's own eps leaves a search no slope
    rounds: int = 1  # of the client that are joined, as if all were of the same examples
    retries: int = 3  # new starts of a trial that diverged
    engine: str = "auto"

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse an update that does not fit, labels that cannot be inferred, an unknown layer or engine."""
        self._check_numbers()
        check_whole("batch_size", knowledge.batch_size)
        aim = aim_at(self, [view], knowledge, 0)
        for problem, _ in problems([aim], knowledge, 1):
            choose(problem, next(iter(aim.observed[0].values())).device, self.engine)

    def _check_numbers(self) -> None:
        """Refuse numbers outside their ranges."""
        check_wholes(self, "iterations", "restarts", "rounds")
        check_whole("retries", self.retries, 0)
        check_number("learning_rate", self.learning_rate, "(0, inf)")
        check_numbers(
            self, "[0, inf)", "scale", "tv", "l2", "batchnorm", "first_batchnorm", "group", "noise", "softness"
        )
        for name in ("natural", "smoothing"):
            check_number(name, getattr(self, name), "[0, inf)")
            if getattr(self, name) and self.optimizer == "lbfgs":
                raise WrongInput(name, "changes the steps of adam, not of lbfgs; use 0, or optimizer=adam")

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, chance: Sequence[Generator], watch: Watch
    ) -> Iterator[tuple[int, Reconstruction]]:
        """Reconstruct all targets at once; one draw a target makes the result equal to one by one."""
        aims = [aim_at(self, views, knowledge, i) for i, views in enumerate(targets)]
        seeds = [draw_seed(rng) for rng in chance]
        groups = group_targets(aims)
        trials = [self.trials([aims[i] for i in group], [seeds[i] for i in group], knowledge) for group in groups]
        states = [one.begin() for one in trials]
        if (saved := watch.load()) is not None:
            for name, value in saved.items():
                number, _, key = name.partition("/")
                states[int(number)][key].copy_(value)

        def pictures() -> list[Reconstruction]:
            best: dict[int, Reconstruction] = {}
            for group, one, state in zip(groups, trials, states, strict=True):
                best |= {i: self.select_best(one, state, aims[i], row) for row, i in enumerate(group)}
            return [best[i] for i in range(len(aims))]

        def save() -> None:
            whole = {f"{i}/{name}": value.clone() for i, state in enumerate(states) for name, value in state.items()}
            watch.save(whole, pictures())

        bar = SharedBar(watch.advance, len(aims))
        for group, one, state in zip(groups, trials, states, strict=True):

            def run(rows: Tensor, group: list[int] = group, one: Trials = one, state: Params = state) -> None:
                """Run all targets of the group, or, where memory ran out, some on their rows of the state."""
                if len(rows) == len(group):
                    return one.run(state, partial(bar.move, len(group)), save)
                some = [group[row] for row in rows.tolist()]
                part = self.trials([aims[i] for i in some], [seeds[i] for i in some], knowledge)
                part.run(one.rows(state, rows), partial(bar.move, len(some)), save)

            halve_on_shortage(run, torch.arange(len(group)))
            save()
            for row, i in enumerate(group):
                yield i, self.select_best(one, state, aims[i], row)

    @property
    def objective(self) -> Matching:
        """The objective that the trials minimise, without the natural prior."""
        tv = self.tv / 2 if self.tv_average else self.tv
        return Matching(self.distance, self.scale, tv, self.l2, self.batchnorm, self.first_batchnorm, self.group)

    def trials(self, aims: Sequence[MatchingTarget], seeds: Sequence[int], knowledge: Knowledge) -> Trials:
        """Return the trials of targets that can be stacked."""
        rounds = problems(aims, knowledge, self.restarts)
        like = next(iter(aims[0].observed[0].values()))
        low, high = (limit.to(like) for limit in knowledge.box)
        labels = [aim.labels for aim in aims if aim.labels is not None]
        scale = (knowledge.mean.to(like), knowledge.std.to(like))
        basis = natural_basis(knowledge.input_shape, *scale) if self.natural else None
        objective = replace(self.objective, natural=self.natural, basis=basis)
        return Trials(
            evaluate=[engine_for(problem, objective, like.device, self.engine) for problem, _ in rounds],
            fixed=[fixed for _, fixed in rounds],
            labels=torch.stack(labels).repeat_interleave(self.restarts, 0) if labels else None,
            seeds=seeds,
            restarts=self.restarts,
            shape=(knowledge.batch_size, *knowledge.input_shape),
            classes=knowledge.classes,
            like=like,
            iterations=self.iterations,
            rule=self.rule(like, basis),
            basis=basis,
            smoothing=smoothing_deviations(self.iterations, self.smoothing / scale[1]) if self.smoothing else None,
            box=(low, high) if self.box else None,
            noise=self.noise > 0 or self.smoothing > 0,
            group=self.group > 0,
            registers=self.registers,
            retries=self.retries,
        )

    def rule(self, like: Tensor, basis: NaturalBasis | None = None) -> StepRule:
        """Return the step rule of the trials."""
        if self.optimizer == "lbfgs":
            return LBFGS(self.iterations, self.learning_rate)
        rates = learning_rates(self.schedule, self.iterations, self.learning_rate).to(like)
        return AdamRule(rates, self.sign, self.noise, basis)

    def select_best(self, trials: Trials, state: Params, aim: MatchingTarget, position: int) -> Reconstruction:
        """Return the restart of one target whose gradient matches best, priors left out."""
        rows = slice(position * self.restarts, (position + 1) * self.restarts)
        matching = state["matching"][rows].nan_to_num(torch.inf)
        trial = int(matching.argmin())
        row, loss = rows.start + trial, float(matching[trial])
        labels = state["labels"][row].argmax(-1) if aim.labels is None else aim.labels
        points = enumerate(state["curve"][:, row].tolist())
        curve = [(i * trials.every, value) for i, value in points if value == value]
        if int(state["clock"][row]) == self.iterations and loss < torch.inf:
            curve.append((self.iterations, loss))
        note = aim.note if loss < torch.inf or not bool(state["clock"][row]) else f"{aim.note}; every trial diverged"
        return Reconstruction(
            Batch(state["inputs"][row].nan_to_num().clone(), labels.clone()),
            loss,
            curve,
            trial,
            int(state["attempt"][rows].sum()),
            note,
        )


def aim_at(attack: GradientMatching, views: Sequence[ServerView], knowledge: Knowledge, index: int) -> MatchingTarget:
    """Read a target's updates as the attack does."""
    if not views:
        raise WrongInput("target", "has no update; use at least one round")
    changes = read_rounds(attack, views, knowledge)
    observed, turn = [change.values for change in changes], changes[0].turn
    unsigned: Sequence[Mask] | None = None
    if getattr(attack, adaptive.MAGNITUDES, False):
        if not turn.optimiser.is_plain:
            raise WrongInput("attack", "magnitudes=true needs clients of plain gradient descent; leave it out")
        pairs = [adaptive.read_magnitudes(view, one, knowledge) for view, one in zip(views, observed, strict=True)]
        observed, unsigned = [one for one, _ in pairs], [mask for _, mask in pairs]
    if attack.distance == "cosine":  # it compares directions
        observed = [rescale(one) for one in observed]
    labels, note = infer(attack.labels, observed[0], knowledge, index, changes[0].bounds)
    notes = [note] if note else []
    lasts = [view.last if attack.follows else None for view in views]
    observed = [one if last is None else tree.mask_tree(one, last) for one, last in zip(observed, lasts, strict=True)]
    masks: list[Mask] | None = None
    compression = None
    if attack.target == "unpruned" and unsigned is None:
        unpruned = [adaptive.mask_unpruned(view) for view in views]
        observed = [o if mask is None else tree.mask_tree(o, mask) for o, mask in zip(observed, unpruned, strict=True)]
        if None in unpruned:
            notes.append("a gradient shows no pruned weights: it is matched as it is")
    if attack.adaptive == "support":
        masks = [adaptive.support(one) for one in observed]
    elif attack.adaptive == "mask":
        masks = [adaptive.mask_again(view, one) for view, one in zip(views, observed, strict=True)]
        masks = [adaptive.join_masks(mask, last) for mask, last in zip(masks, lasts, strict=True)]
        observed = [tree.mask_tree(one, mask) for one, mask in zip(observed, masks, strict=True)]
    elif attack.adaptive == "layer":
        layer = attack.layer or adaptive.find_defended_layer(observed[0], knowledge.net, knowledge.classes)
        observed = [adaptive.without_layer(one, layer) for one in observed]
        if not observed[0]:
            raise WrongInput("adaptive", f"layer leaves nothing to match: {layer} is the only one; use another mode")
        notes.append(f"adaptive: the layer {layer} is left out of the matching")
    elif attack.adaptive == "reapply":
        compression, note = adaptive.compression_of(observed[0], knowledge)
        notes.append(note)
    stated = None if knowledge.statistics is None else knowledge.statistics[index]
    statistics = [read_statistics(view, knowledge) if attack.batchnorm and stated is None else stated for view in views]
    if attack.batchnorm and stated is None and statistics[0] is not None:
        notes.append("BatchNorm statistics of the batch: read from the client's running ones")
    elif attack.batchnorm and stated is None and _list_initial(views[0].sent):
        notes.append("BatchNorms that have seen no batch are left out of the prior")
    sent = [_tensors(view.sent, knowledge) for view in views]
    both = zip(changes, observed, strict=True)
    bounds = [_mask_bounds(change.bounds, one) for change, one in both if change.bounds is not None]
    return MatchingTarget(
        index, sent, observed, masks, unsigned, compression, labels, turn, bounds or None, statistics, "; ".join(notes)
    )


def read_rounds(attack: GradientMatching, views: Sequence[ServerView], knowledge: Knowledge) -> list[ObservedChange]:
    """Return the changes to match of a target's rounds."""
    if not attack.unrolls and isinstance(views[0].update, Weights):
        knowledge = replace(knowledge, local_steps=1, local_batch=None, local_epochs=None, optimiser=PLAIN_SGD)
    changes = [read_change(view, knowledge, bounded=attack.adaptive != "reapply") for view in views]
    softness = attack.softness if knowledge.optimiser.is_adaptive else 0.0
    return [change._replace(turn=replace(change.turn, softness=softness)) for change in changes]


def _mask_bounds(bounds: Bounds, observed: Params) -> Bounds:
    """Return the bounds of the entries to match; an entry that was set to 0 is matched as 0."""
    low, high = ({name: torch.where(value == 0, 0, part[name]) for name, value in observed.items()} for part in bounds)
    return low, high


def rescale(gradient: Params) -> Params:
    """Return a gradient divided by a power of two where its largest entry is far from 1: its squares would overflow.

    Example:
        >>> rescale({"w": torch.tensor([2.0**70, 2.0**69])})
        {'w': tensor([1.0000, 0.5000])}
    """
    largest = max((float(value.abs().max()) for value in gradient.values() if value.numel()), default=0.0)
    exponent = math.frexp(largest)[1] - 1
    if largest == 0 or abs(exponent) <= 20:
        return gradient
    return {name: torch.ldexp(value, torch.tensor(-exponent, device=value.device)) for name, value in gradient.items()}


def _list_initial(sent: Params) -> set[str]:
    """Return the BatchNorms whose running statistics are still the initial ones."""
    tracked = ".num_batches_tracked"
    return {name.removesuffix(tracked) for name, value in sent.items() if name.endswith(tracked) and not value.any()}


def _tensors(sent: Params, knowledge: Knowledge) -> Params:
    """Return all tensors that the network needs; buffers that are not saved come from the network itself."""
    like = next(iter(sent.values()))
    initial = {**dict(knowledge.net.named_parameters()), **dict(knowledge.net.named_buffers())}
    return {name: sent[name] if name in sent else value.detach().to(like.device) for name, value in initial.items()}


def group_targets(aims: Sequence[MatchingTarget]) -> list[list[int]]:
    """Return groups of targets that can be stacked: equal rounds, matched names, compression and local steps."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, aim in enumerate(aims):
        key = (len(aim.observed), tuple(aim.observed[0]), aim.compression, aim.turn)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def problems(aims: Sequence[MatchingTarget], knowledge: Knowledge, restarts: int) -> list[tuple[Problem, Params]]:
    """Return the problem of every round and its fixed tensors: the expected statistics of the BatchNorms."""
    net = structure(knowledge.net, knowledge.batchnorm).to(next(iter(aims[0].observed[0].values())).device)

    def stack_trees(trees: Sequence[Mapping[str, Tensor]]) -> Params:
        return {name: value.repeat_interleave(restarts, 0) for name, value in tree.stack(trees).items()}

    def stack_masks(masks: Sequence[Sequence[Mask] | None], i: int) -> Mask | None:
        return None if masks[0] is None else stack_trees([mask[i] for mask in masks if mask])

    def stack_bounds(bounds: Sequence[Sequence[Bounds] | None], i: int) -> Bounds | None:
        if bounds[0] is None:
            return None
        low, high = (stack_trees([pairs[i][side] for pairs in bounds if pairs]) for side in (0, 1))
        return low, high

    rounds = []
    for i in range(len(aims[0].observed)):
        sent = [aim.sent[i] for aim in aims]
        own_weights = not all(tree.are_equal(sent[0], other) for other in sent[1:])
        problem = Problem(
            net=net,
            sent=stack_trees(sent) if own_weights else sent[0],
            observed=stack_trees([aim.observed[i] for aim in aims]),
            mask=stack_masks([aim.masks for aim in aims], i),
            unsigned=stack_masks([aim.unsigned for aim in aims], i),
            own_weights=own_weights,
            loss=knowledge.loss,
            turn=aims[0].turn,
            bounds=stack_bounds([aim.bounds for aim in aims], i),
            compression=aims[0].compression,
        )
        rounds.append((problem, stack_trees([_statistics(aim, i, knowledge) for aim in aims])))
    return rounds


def _statistics(aim: MatchingTarget, i: int, knowledge: Knowledge) -> Params:
    """Return the batch's statistics where the attacker knows them, else the running ones of the sent model.

    A BatchNorm that has seen no batch has statistics of no data, and the attacker knows this: they are left out.
    """
    known = aim.statistics[i]
    statistics: Params = {}
    for layer, name in enumerate(batchnorm_order(knowledge.net, aim.sent[i], knowledge.input_shape)):
        if known is None and name in _list_initial(aim.sent[i]):
            continue
        for moment, running in (("mean", "running_mean"), ("var", "running_var")):
            value = aim.sent[i].get(f"{name}.{running}") if known is None else known.get(f"{name}.{moment}")
            if value is not None:
                statistics[f"batchnorm.{layer}.{moment}"] = value
    return statistics
