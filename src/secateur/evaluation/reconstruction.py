"""Reconstructions against the truth: which is which, how alike they are, and the rows that say so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from secateur.attacks.inversion.label_inference import labels_right
from secateur.catalogue import Choice
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction
from secateur.metrics.image import PictureScores, mse, picture_scores, psnr, summary
from secateur.metrics.membership import Estimate, share_of
from secateur.metrics.pictures import match
from secateur.runs.rows import Row

PARTS = 8  # of the notes of all targets that stand beside a summary
GREY = 0.5  # of a picture for which the attack found nothing
CLEARER = 4  # times less squared error than grey, 6 dB: where a picture of its own counts as recognisable
PAIRINGS = 20  # of updates with each other's truths, at most, for the chance level of large batches


@dataclass(frozen=True, eq=False)
class Likeness:
    """What was made of one target, picture by picture."""

    guess: Tensor  # (B, C, H, W) pixels in the order of the truths; mid-grey where nothing was found
    labels: list[int | None]  # what the attack believes each to be
    truth: Tensor | None = None  # (B, C, H, W) pixels, of an update that was not captured elsewhere
    found: Tensor | None = None  # (B,) bool
    right: Tensor | None = None  # (B,) bool: as many as there are labels right, whichever picture they stand with


class Scoring(NamedTuple):
    """What every measure of likeness needs."""

    lpips: Params | None  # the weights; None where they are absent


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an attack made of some targets, one after another."""

    made: list[Reconstruction | None]  # None: the attack gave nothing
    alike: list[Likeness]
    scores: PictureScores  # of all their pictures; empty where there is no truth or none were asked for
    seconds: float = 0.0

    def values(self, target: int) -> dict[str, list[float]]:
        """The scores of one target's pictures."""
        size = len(self.alike[target].guess)
        first = sum(len(each.guess) for each in self.alike[:target])
        return {name: value[first : first + size].tolist() for name, value in self.scores.values.items()}


def compare(truth: Batch | None, made: Reconstruction | None, knowledge: Knowledge) -> Likeness:
    """Match reconstructions to truths by assignment: an attack returns a batch in no order, and maybe not all of it."""
    guess, labels = _pictures(made, knowledge)
    if truth is None:
        return Likeness(guess, list(labels.tolist()))
    pixels, number = knowledge.pixels(truth.inputs).double().cpu(), len(guess)
    padded = torch.cat([guess, torch.full_like(pixels, GREY)[: max(0, len(pixels) - number)]])
    rows = match(pixels, padded)
    believed = [int(labels[row]) if row < number else None for row in rows.tolist()]
    hits = 0 if made is None else labels_right(made.batch.labels, truth.labels)
    return Likeness(padded[rows], believed, pixels, rows < number, torch.arange(len(pixels)) < hits)


def judge(
    truths: Sequence[Batch | None],
    made: Sequence[Reconstruction | None],
    knowledge: Knowledge,
    seconds: float = 0.0,
    scoring: Scoring | None = None,
) -> Outcome:
    """Compare what an attack made of some targets with their truths, where there are any."""
    alike = [compare(truth, each, knowledge) for truth, each in zip(truths, made, strict=True)]
    known = [each.truth for each in alike if each.truth is not None]
    scores = PictureScores({}, {})
    if known and scoring is not None:
        scores = picture_scores(torch.cat(known), torch.cat([each.guess for each in alike]), scoring.lpips)
    return Outcome(list(made), alike, scores, seconds)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of several groups of targets as one."""
    names = outcomes[0].scores.values
    values = {name: torch.cat([each.scores.values[name] for each in outcomes]) for name in names}
    return Outcome(
        [made for each in outcomes for made in each.made],
        [alike for each in outcomes for alike in each.alike],
        PictureScores(values, outcomes[0].scores.notes),
        sum(each.seconds for each in outcomes),
    )


def target_rows(labels: dict[str, Any], numbers: Sequence[int], outcome: Outcome) -> list[Row]:
    """Each target's rows: what the attack itself thinks of it, and every measure of every picture."""
    rows = []
    for i, (number, made) in enumerate(zip(numbers, outcome.made, strict=True)):
        own = _with(labels, target=number, trial=made.trial if made else None)
        loss, note = (made.loss, made.note) if made else (None, "the attack gave nothing")
        rows.append(Row(**_with(own, item=None), metric="attack_loss", value=loss, note=note))
        for metric, values in outcome.values(i).items():
            rows += [Row(**_with(own, item=item), metric=metric, value=x) for item, x in enumerate(values)]
    return rows


def summary_rows(labels: dict[str, Any], outcome: Outcome, rng: Generator) -> list[Row]:
    """All targets of one attack and seed: mean, median, least and most of every measure, and what was found at all."""
    made = [each for each in outcome.made if each is not None]
    labels = _with(labels, target=None, trial=None, item=None)
    rows = [Row(**labels, metric="diverged", value=sum(each.diverged for each in made))]
    rows.append(_failed(labels, outcome.made))
    rows.append(Row(**labels, metric="seconds", value=outcome.seconds, timing=True))
    notes = outcome.scores.notes | {"attack_loss": _gathered(each.note for each in made)}
    found = summary({"attack_loss": torch.tensor([each.loss for each in made])}, rng) if made else {}
    sizes = [len(each.guess) for each in outcome.alike]
    found |= summary(outcome.scores.values, rng, sizes=sizes) if outcome.scores.values else {}
    for metric, each in found.items():
        note = "; ".join(filter(None, (each.mean.note, notes.get(metric)))) or None
        rows.append(Row(**labels, metric=metric, **(each.mean._asdict() | {"note": note})))
        rows.append(Row(**labels, metric=f"{metric}_median", **each.median._asdict()))
        rows.append(Row(**labels, metric=f"{metric}_min", value=each.minimum))
        rows.append(Row(**labels, metric=f"{metric}_max", value=each.maximum))
    absent = [metric for metric in outcome.scores.notes if metric not in outcome.scores.values]
    rows += [Row(**labels, metric=metric, value=None, note=notes[metric]) for metric in absent]
    return rows + (_shares(labels, outcome.alike) if outcome.scores.values else [])


def _failed(labels: dict[str, Any], made: Sequence[Reconstruction | None]) -> Row:
    """The share of targets of which nothing is known, since the attack gave nothing or all its trials diverged."""
    broken = [each is None or not math.isfinite(each.loss) for each in made]
    note = "nothing is known of targets for which the attack gave nothing or all its trials diverged"
    return Row(**labels, metric="failed", value=sum(broken) / len(broken), note=note if any(broken) else None)


def _gathered(notes: Iterable[str | None]) -> str:
    """What the notes of all targets say, each part once; of very many the first: the targets' own rows have all."""
    parts = list(dict.fromkeys(part for note in notes if note for part in note.split("; ")))
    more = len(parts) - PARTS
    return "; ".join(parts[:PARTS] + ([f"{more} more in the rows of the targets"] if more > 0 else []))


def _shares(labels: dict[str, Any], alike: Sequence[Likeness]) -> list[Row]:
    """What was found at all, how many labels, and which pictures are nearest to their own truth of all."""
    found, right, truth, guess = (
        torch.cat([getattr(each, name) for each in alike]) for name in ("found", "right", "truth", "guess")
    )
    sizes = [len(each.guess) for each in alike]
    rows = [Row(**labels, metric="recovered", **share_by_target(found, sizes)._asdict())]
    if labels["extra"]["labels"] == "oracle":
        rows.append(Row(**labels, metric="label_accuracy", value=None, note="the attacker was given the labels"))
    else:
        rows.append(Row(**labels, metric="label_accuracy", **share_by_target(right, sizes)._asdict()))
    grey = torch.full_like(truth, GREY)
    nearest = torch.cdist(guess.flatten(1), truth.flatten(1)).argmin(1)
    own = found & (nearest == torch.arange(len(truth)))
    if len(truth) > 1:
        note = f"the share of pictures whose nearest of {len(truth)} truths is their own"
        rows.append(Row(**labels, metric="identified", **(share_by_target(own, sizes)._asdict() | {"note": note})))
        rows.append(Row(**labels, metric="identified_chance", value=_by_chance(alike, nearest)))
    clear = own & (mse(truth, guess) <= mse(truth, grey) / CLEARER)
    note = f"nearest to their own truth of all, and at least {CLEARER} times nearer in squares than a mid-grey picture"
    rows.append(Row(**labels, metric="recognisable", **(share_by_target(clear, sizes)._asdict() | {"note": note})))
    note = "what a mid-grey picture scores: knowing nothing"
    return [*rows, Row(**labels, metric="psnr_grey", value=float(psnr(truth, grey).mean()), note=note)]


def _by_chance(alike: Sequence[Likeness], nearest: Tensor) -> float:
    """The share nearest to its own where it does not matter whose truth is whose: mean over pairings of the updates.

    Matching itself makes pictures their own: of noise in batches of 100 it does with a third, not with one in 100. So
    every update's pictures are matched to each update's truths in turn, its own among them, and all are held to the
    same rule. Of one picture an update that is one in all truths; of one update alone nothing is above chance.
    """
    sizes = [len(each.guess) for each in alike]
    if max(sizes) == 1:
        return 1 / len(sizes)
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    truths = [torch.as_tensor(each.truth) for each in alike]
    hits = pairs = 0
    for shift in range(min(len(sizes), PAIRINGS)):
        for i, made in enumerate(alike):
            j = (i + shift) % len(sizes)
            number = min(sizes[i], sizes[j])
            rows = match(truths[j][:number], made.guess)
            theirs = nearest[first[i] + rows] == first[j] + torch.arange(number)
            hits += int((torch.as_tensor(made.found)[rows] & theirs).sum())
            pairs += number
    return hits / pairs


def share_by_target(hits: Tensor, sizes: Sequence[int]) -> Estimate:
    """A share of pictures with Wilson's 95 % interval for as many as they are worth: those of one update are not alone.

    By how the targets' own counts differ, n = p (1 - p) (sum of sizes)^2 / sum over targets of (hits - p size)^2, at
    most all pictures; where they do not differ, the number of targets. Of one picture a target n is exactly that.

    Example:
        >>> [round(end, 3) for end in share_by_target(torch.tensor([True, True, False, False]), [2, 2])[:3]]
        [0.5, 0.095, 0.905]
        >>> share_by_target(torch.tensor([True, False]), [1, 1]) == share_of(0.5, 2)
        True
    """
    p = float(hits.double().mean())
    off = [float(part.double().sum()) - p * len(part) for part in torch.split(hits, list(sizes))]
    spread = sum(each * each for each in off)
    worth = p * (1 - p) * hits.numel() ** 2 / spread if spread > 1e-12 else len(sizes)
    return share_of(p, min(worth, hits.numel()))


def _pictures(made: Reconstruction | None, knowledge: Knowledge) -> tuple[Tensor, Tensor]:
    """An attack's pictures as pixels on the CPU, and their labels; what is not finite, or diverged, is left out."""
    if made is None:
        return torch.empty(0, *knowledge.input_shape, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    pixels = knowledge.pixels(made.batch.inputs).double().cpu()
    finite = pixels.isfinite().flatten(1).all(1) & math.isfinite(made.loss)
    return pixels[finite], made.batch.labels.cpu()[finite]


def _with(labels: dict[str, Any], **more: Any) -> dict[str, Any]:
    return labels | {"extra": labels["extra"] | more}


def attack_labels(labels: dict[str, Any], extra: dict[str, Any], attack: Choice | None) -> dict[str, Any]:
    """The labels of an attack's rows: which one, whether it adapts, and its weight of total variation."""
    made = None if attack is None else attack.make()
    adaptive = None if made is None else getattr(made, "adaptive", "none") != "none"
    named = {"attack": None if attack is None else str(attack), "adaptive": adaptive}
    return labels | named | {"extra": extra | {"total_variation": getattr(made, "tv", None)}}
