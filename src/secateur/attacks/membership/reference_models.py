"""Reference models of the attacker: their members, their answers, and a threshold tuned with them as targets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.attacks.membership.thresholds import best_threshold, shadow_sides
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, Shadow

ROWS = 10_000  # rows of the attacker over all its models: enough to tune a threshold
REHEARSALS = 16  # models that serve as the target: more hardly change the threshold

Ask = Callable[[BlackBox, Batch], Tensor]  # values of a model for each example: (..., N)
# (own (..., N), others (M, ..., N), inside (M, N)) -> scores (N,): high = member, NaN if the others give no score
ScoreRule = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class References:
    """Models of the attacker and their values for the rows of their pool."""

    models: InOut
    values: Tensor  # (M, ..., N) over the models' pool
    ask: Ask
    disjoint: bool  # True for shadows that never trained on the candidates

    @property
    def inside(self) -> Tensor:
        """Membership of the pool rows in the models, (M, N) bool, on the device of the values."""
        return self.models.membership.to(self.values.device)

    @property
    def out_only(self) -> bool:
        """True if the models answered the candidates, and none was trained on any of them."""
        return not self.disjoint and not bool(self.models.membership.any())

    def query(self, batch: Batch, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the models' values for examples, (M, ..., n), and the membership of the examples, (M, n).

        Rows of the pool are looked up. Other rows are queried, and no model trained on them.
        """
        if ids is not None and not self.disjoint:
            rows = ids.to(self.values.device)
            return self.values[..., rows], self.inside[:, rows]
        values = torch.stack([self.ask(box, batch) for box in self.models.boxes])
        return values, torch.zeros(len(values), batch.size, dtype=torch.bool, device=values.device)

    def mode_for(self, name: str, mode: str, candidates: Candidates) -> tuple[str, str | None]:
        """Return the mode for these candidates, online or offline, and a note on models that lack."""
        if not self.disjoint:
            _check_ids(candidates, self.models.pool.size)
        if mode == "offline":
            return "offline", self._describe_one_sided(candidates.ids, ("out",))
        if candidates.ids is not None and not self.disjoint and not self.out_only:
            return "online", self._describe_one_sided(candidates.ids, ("in", "out"))
        if mode == "online":
            raise WrongInput(f"attack {name}", "mode online needs in-out models over the candidates; use mode offline")
        return "offline", f"{name} ran offline: none of the attacker's models trained on the candidates"

    def _describe_one_sided(self, ids: Tensor | None, sides: Sequence[str]) -> str | None:
        """Return how many candidates have no model on a side that the attack uses; None if all have one."""
        if ids is None or self.disjoint:
            return None
        trained, number = self.models.membership.sum(0)[ids.cpu()], len(self.models.membership)
        empty = {"in": int((trained == 0).sum()), "out": int((trained == number).sum())}
        shown = " and ".join(f"{empty[side]:,} have no {side} model" for side in sides if empty[side])
        return f"of {len(ids):,} examples {shown}: these take the average gap between in and out" if shown else None

    def thresholds(self, rule_of: Callable[[str], ScoreRule]) -> dict[str, float]:
        """Return the best threshold of each possible mode; none if the models have no members to learn it from."""
        if self.out_only:
            return {}
        modes = ("offline",) if self.disjoint else ("online", "offline")
        return {mode: self.threshold(rule_of(mode)) for mode in modes}

    def threshold(self, rule: ScoreRule) -> float:
        """Return the best threshold when each model in turn is the target and the others are its references."""
        sides: dict[bool, list[Tensor]] = {True: [], False: []}
        for target in range(min(len(self.values), REHEARSALS)):
            rest = torch.arange(len(self.values), device=self.values.device) != target
            scores = rule(self.values[target], self.values[rest], self.inside[rest])
            usable = ~scores.isnan()
            if self.disjoint:  # candidates of disjoint shadows always have out models, so these need no average gap
                usable &= ~self.inside[rest].all(0)
            for truth, side_scores in sides.items():
                side_scores.append(scores[(self.inside[target] == truth) & usable])
        members, nonmembers = torch.cat(sides[True]), torch.cat(sides[False])
        if not members.numel() or not nonmembers.numel():
            raise WrongInput("shadows", "cannot be tried on one another; use more models, with different members")
        return best_threshold(members, nonmembers)


def gather(shadows: Sequence[Shadow] | InOut, ask: Ask, rng: Generator) -> References:
    """Query every model of the attacker on its own rows."""
    models = in_out_of(shadows, rng)
    if models.membership.shape != (len(models.boxes), models.pool.size):
        wanted = (len(models.boxes), models.pool.size)
        raise WrongInput("shadows", f"membership must have the shape {wanted}, not {tuple(models.membership.shape)}")
    values = torch.stack([ask(box, models.pool) for box in models.boxes])
    return References(models, values, ask, disjoint=not isinstance(shadows, InOut))


def in_out_of(shadows: Sequence[Shadow] | InOut, rng: Generator) -> InOut:
    """Return the in-out design of the attacker's models.

    For disjoint shadows the pool is a sample of their own rows. Rows that several shadows hold are identified by
    content, and every model that did not train on a row is out for that row.
    """
    if isinstance(shadows, InOut):
        return shadows
    parts = [batch for _, batch, _ in shadow_sides(shadows, ROWS, rng)]
    pool = Batch(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))
    keys = content(pool.inputs)
    first = sorted({key: row for row, key in reversed(list(enumerate(keys)))}.values())
    trained = [set(content(shadow.members.inputs)) for shadow in shadows]
    membership = torch.tensor([[keys[row] in known for row in first] for known in trained])
    return InOut([s.box for s in shadows], pool.take(torch.tensor(first).to(pool.labels.device)), membership)


def content(inputs: Tensor) -> list[bytes]:
    """Return a key of every row that depends only on its values; sorting by the key is as good as shuffling."""
    rows = inputs.detach().cpu().contiguous().flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def average(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean over the models chosen for each example: (M, ..., N), (M, N) -> (..., N); NaN without a model."""
    weight = weights(chosen, values)
    return (values * weight).sum(0) / weight.sum(0)


def average_sides(values: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of the in and of the out models of each example: (M, ..., N), (M, N) -> two of (..., N).

    Membership may be random. An example without models on one side has the mean of its other side, moved by the average
    gap of the examples with both. Without any such example it is NaN.

    Example:
        >>> inside = torch.tensor([[True, False], [False, False]])
        >>> average_sides(torch.tensor([[3.0, 1.0], [1.0, 5.0]]), inside)
        (tensor([3., 5.]), tensor([1., 3.]))
    """
    inner, outer = average(values, inside), average(values, ~inside)
    gap = (inner - outer).nanmean(-1, keepdim=True)
    return inner.where(~inner.isnan(), outer + gap), outer.where(~outer.isnan(), inner - gap)


def weights(chosen: Tensor, values: Tensor) -> Tensor:
    """Return a mask (M, N) as zeros and ones that broadcast with values (M, ..., N)."""
    return chosen.view(len(chosen), *[1] * (values.ndim - 2), -1).to(values)


@dataclass(frozen=True)
class Least:
    """Smallest number of models that an attack needs: disjoint shadows, or in-out models."""

    disjoint: int
    in_out: int

    def shortage(self, name: str, mode: str, shadows: int, in_out: int) -> str | None:
        """Return the reason why there are too few models; None if there are enough. In-out models take precedence."""
        if mode == "online" and not in_out:
            return f"{name} in mode online needs at least {self.in_out} in-out models; 0 given"
        kind, number, least = ("in-out", in_out, self.in_out) if in_out else ("shadow", shadows, self.disjoint)
        return f"{name} needs at least {least} {kind} models; {number} given" if number < least else None


def require_models(name: str, shadows: Sequence[Shadow] | InOut, least: Least) -> None:
    """Refuse fewer models than an attack needs, and in-out models of which none was trained otherwise than the others.

    Models that are out of all examples count as disjoint shadows.
    """
    if not isinstance(shadows, InOut) or not bool(shadows.membership.any()):
        number = len(shadows.boxes) if isinstance(shadows, InOut) else len(shadows)
        missing = least.shortage(name, "offline", number, 0)
    else:
        trained, number = shadows.membership.sum(0), len(shadows.membership)
        missing = least.shortage(name, "auto", 0, number)
        if missing is None and not bool(((trained > 0) & (trained < number)).any()):
            missing = f"{name} needs an example that is in one of the models and out of another; here is none"
    if missing is not None:
        raise WrongInput("shadows", missing)


def _check_ids(candidates: Candidates, pool: int) -> None:
    ids = candidates.ids
    if ids is not None and (ids.numel() != candidates.batch.size or bool(((ids < 0) | (ids >= pool)).any())):
        raise WrongInput("candidates", f"ids must name a row of the pool, 0 to {pool - 1}, for every candidate")
