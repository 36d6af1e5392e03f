"""Evaluation of reconstructions: matching to the truth, similarity measures, and rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from secateur.attacks.inversion.label_inference import labels_right
from secateur.catalogue import Choice
from secateur.interfaces import Batch, Knowledge, Params, Reconstruction
from secateur.metrics.image import PictureScores, denoise, mse, picture_scores, psnr, summary
from secateur.metrics.lpips import lpips
from secateur.metrics.membership import Estimate, share_of
from secateur.metrics.pictures import match
from secateur.runs.rows import Row, join_notes

PARTS = 8  # most parts of the targets' notes in a summary
NOT_RUN = "not run: "  # start of the note of an attack that could not be mounted
COSINE = "update_cosine"  # metric of a sent update: its cosine with the one without a defense
GREY = 0.5  # pixel value of a picture that the attack did not return
CLEARER = 4  # a recognisable picture has so many times less squared error than grey (6 dB)
NEARER = 2  # by LPIPS it is so many times nearer to its own truth than to any of the most similar truths
SIMILAR = 10  # truths that a picture is compared with by LPIPS
JUDGES = {
    "squares": f"at least {CLEARER} times nearer in squares to their own truth than a mid-grey picture",
    "denoised": "the same after a light denoiser, and nearer than the truth's mean colour",
    "lpips": f"at least {NEARER} times nearer by LPIPS to their own truth than to the {SIMILAR} most similar truths",
}
COLOUR = "in colour"  # note of a number of pictures
PAIRINGS = 20  # most pairings of updates with each other's truths, for the chance level


@dataclass(frozen=True, eq=False)
class MatchedPictures:
    """Pictures reconstructed from one target, matched to its truth."""

    guess: Tensor  # (B, C, H, W) pixels in the order of the truths; mid-grey where the attack returned none
    labels: list[int | None]  # the attack's label of each picture
    truth: Tensor | None = None  # (B, C, H, W) pixels; None for a captured update
    returned: Tensor | None = None  # (B,) bool: False where the attack returned no picture
    right: Tensor | None = None  # (B,) bool: True as often as labels are right; positions carry no meaning


class Scoring(NamedTuple):
    """Weights that the similarity measures need."""

    lpips: Params | None  # None: not available


@dataclass(frozen=True, eq=False)
class AttackOutcome:
    """Reconstructions of an attack's targets, in order, with their scores."""

    reconstructions: list[Reconstruction | None]  # None: the attack returned nothing
    matches: list[MatchedPictures]
    scores: PictureScores  # of all pictures; empty without truth or without `scoring`
    seconds: float = 0.0
    lpips: Params | None = None  # the weights of LPIPS, for its judgement; None: not available

    def values(self, target: int) -> dict[str, list[float]]:
        """Return the scores of one target's pictures."""
        size = len(self.matches[target].guess)
        first = sum(len(pair.guess) for pair in self.matches[:target])
        return {name: value[first : first + size].tolist() for name, value in self.scores.values.items()}


def compare(truth: Batch | None, reconstruction: Reconstruction | None, knowledge: Knowledge) -> MatchedPictures:
    """Match reconstructions to truths by assignment: an attack's batch has no order and may be incomplete."""
    guess, labels = _pictures(reconstruction, knowledge)
    if truth is None:
        return MatchedPictures(guess, list(labels.tolist()))
    pixels, number = knowledge.pixels(truth.inputs).double().cpu(), len(guess)
    padded = torch.cat([guess, torch.full_like(pixels, GREY)[: max(0, len(pixels) - number)]])
    rows = match(pixels, padded)
    matched_labels = [int(labels[row]) if row < number else None for row in rows.tolist()]
    hits = 0 if reconstruction is None else labels_right(reconstruction.batch.labels, truth.labels)
    return MatchedPictures(padded[rows], matched_labels, pixels, rows < number, torch.arange(len(pixels)) < hits)


def judge(
    truths: Sequence[Batch | None],
    reconstructions: Sequence[Reconstruction | None],
    knowledge: Knowledge,
    seconds: float = 0.0,
    scoring: Scoring | None = None,
) -> AttackOutcome:
    """Compare the reconstructions of an attack's targets with the truths that are known."""
    matches = [compare(truth, guess, knowledge) for truth, guess in zip(truths, reconstructions, strict=True)]
    known = [pair.truth for pair in matches if pair.truth is not None]
    scores = PictureScores({}, {})
    if known and scoring is not None:
        scores = picture_scores(torch.cat(known), torch.cat([pair.guess for pair in matches]), scoring.lpips)
    return AttackOutcome(list(reconstructions), matches, scores, seconds, scoring.lpips if scoring else None)


def join_outcomes(outcomes: Sequence[AttackOutcome]) -> AttackOutcome:
    """Join the outcomes of several groups of targets."""
    names = outcomes[0].scores.values
    values = {name: torch.cat([outcome.scores.values[name] for outcome in outcomes]) for name in names}
    return AttackOutcome(
        [reconstruction for outcome in outcomes for reconstruction in outcome.reconstructions],
        [pair for outcome in outcomes for pair in outcome.matches],
        PictureScores(values, outcomes[0].scores.notes),
        sum(outcome.seconds for outcome in outcomes),
        outcomes[0].lpips,
    )


def target_rows(labels: dict[str, Any], numbers: Sequence[int], outcome: AttackOutcome) -> list[Row]:
    """Return the rows of each target: the attack's loss, and every measure of every picture."""
    rows = []
    for i, (number, reconstruction) in enumerate(zip(numbers, outcome.reconstructions, strict=True)):
        target_labels = with_extras(labels, target=number, trial=reconstruction.trial if reconstruction else None)
        loss, note = (reconstruction.loss, reconstruction.note) if reconstruction else (None, "the attack gave nothing")
        rows.append(Row(**with_extras(target_labels, item=None), metric="attack_loss", value=loss, note=note))
        for metric, values in outcome.values(i).items():
            for item, value in enumerate(values):
                rows.append(Row(**with_extras(target_labels, item=item), metric=metric, value=value))
    return rows


def summary_rows(labels: dict[str, Any], outcome: AttackOutcome, rng: Generator) -> list[Row]:
    """Summarise all targets of one attack and seed: mean, median, minimum and maximum of measures, and shares."""
    reconstructions = [reconstruction for reconstruction in outcome.reconstructions if reconstruction is not None]
    labels = with_extras(labels, target=None, trial=None, item=None)
    rows = [Row(**labels, metric="diverged", value=sum(reconstruction.diverged for reconstruction in reconstructions))]
    rows.append(_failure_row(labels, outcome.reconstructions))
    rows.append(Row(**labels, metric="seconds", value=outcome.seconds, timing=True))
    notes = outcome.scores.notes | {
        "attack_loss": _gather_notes(reconstruction.note for reconstruction in reconstructions)
    }
    losses = torch.tensor([reconstruction.loss for reconstruction in reconstructions])
    summaries = summary({"attack_loss": losses}, rng) if reconstructions else {}
    sizes = [len(pair.guess) for pair in outcome.matches]
    summaries |= summary(outcome.scores.values, rng, sizes=sizes) if outcome.scores.values else {}
    for metric, measured in summaries.items():
        note = join_notes(measured.mean.note, notes.get(metric))
        rows.append(Row(**labels, metric=metric, **(measured.mean._asdict() | {"note": note})))
        rows.append(Row(**labels, metric=f"{metric}_median", **measured.median._asdict()))
        rows.append(Row(**labels, metric=f"{metric}_min", value=measured.minimum))
        rows.append(Row(**labels, metric=f"{metric}_max", value=measured.maximum))
    absent = [metric for metric in outcome.scores.notes if metric not in outcome.scores.values]
    rows += [Row(**labels, metric=metric, value=None, note=notes[metric]) for metric in absent]
    return rows + (_shares(labels, outcome.matches, outcome.lpips) if outcome.scores.values else [])


def _failure_row(labels: dict[str, Any], reconstructions: Sequence[Reconstruction | None]) -> Row:
    """Return the share of targets without a result: the attack returned nothing, or all its trials diverged."""
    broken = [reconstruction is None or not math.isfinite(reconstruction.loss) for reconstruction in reconstructions]
    note = "nothing is known of targets for which the attack gave nothing or all its trials diverged"
    return Row(**labels, metric="failed", value=sum(broken) / len(broken), note=note if any(broken) else None)


def _gather_notes(notes: Iterable[str | None]) -> str:
    """Join the notes of all targets, each part once, at most PARTS; the targets' rows hold all notes."""
    parts = list(dict.fromkeys(part for note in notes if note for part in note.split("; ")))
    more = len(parts) - PARTS
    return "; ".join(parts[:PARTS] + ([f"{more} more in the rows of the targets"] if more > 0 else []))


def _shares(labels: dict[str, Any], matches: Sequence[MatchedPictures], weights: Params | None) -> list[Row]:
    """Return rows of shares: pictures returned, labels right, pictures nearest to their truth, recognisable."""
    returned, right, truth, guess = (
        torch.cat([getattr(pair, name) for pair in matches]) for name in ("returned", "right", "truth", "guess")
    )
    sizes = [len(pair.guess) for pair in matches]

    def share_row(metric: str, hits: Tensor, note: str | None = None) -> Row:
        estimate = share_by_target(hits, sizes)
        return Row(**labels, metric=metric, **(estimate._asdict() | ({"note": note} if note else {})))

    colour = COLOUR if truth.shape[1] == 3 else None
    rows = [Row(**labels, metric="updates", value=len(sizes))]
    rows += [Row(**labels, metric="pictures", value=sum(sizes), note=colour), share_row("returned", returned)]
    if labels["extra"]["labels"] == "oracle":
        rows.append(Row(**labels, metric="label_accuracy", value=None, note="the attacker was given the labels"))
    else:
        rows.append(share_row("label_accuracy", right))
    nearest = _nearest(guess, truth)
    if len(truth) > 1:
        note = f"the share of pictures whose nearest of {len(truth)} truths is their own"
        rows.append(share_row("identified", returned & (nearest == torch.arange(len(truth))), note))
        rows.append(Row(**labels, metric="identified_chance", value=_chance_level(matches, nearest)))
    judged = recognise(truth, guess, returned, weights)
    seen = [name for name, hits in judged.items() if bool(hits.any())]
    note = f"recognised by {', '.join(seen)}" if seen else f"recognised by none of {', '.join(judged)}"
    rows.append(share_row("recognisable", torch.stack(list(judged.values())).any(0), note))
    rows += [share_row(f"recognisable_{name}", hits, JUDGES[name]) for name, hits in judged.items()]
    note, grey = "what a mid-grey picture scores: knowing nothing", torch.full_like(truth, GREY)
    return [*rows, Row(**labels, metric="psnr_grey", value=float(psnr(truth, grey).mean()), note=note)]


def recognise(truth: Tensor, guess: Tensor, returned: Tensor, weights: Params | None = None) -> dict[str, Tensor]:
    """Return by judge, (N,) bool: True for pictures that a viewer would recognise. See JUDGES.

    Whoever judges, the picture is nearest in squares to its own truth of all. LPIPS judges where it has `weights` and
    other truths to compare with.
    """
    numbers, grey = torch.arange(len(truth)), mse(truth, torch.full_like(truth, GREY))
    flat = mse(truth, truth.mean((2, 3), keepdim=True).expand_as(truth))
    identified, smooth = returned & (_nearest(guess, truth) == numbers), denoise(guess)
    clear = identified & (mse(truth, guess) <= grey / CLEARER)
    error = mse(truth, smooth)
    denoised = returned & (_nearest(smooth, truth) == numbers) & (error <= grey / CLEARER) & (error < flat)
    judged = {"squares": clear, "denoised": denoised}
    if weights is not None and len(truth) > 1:
        judged["lpips"] = _nearest_by_lpips(truth, guess, identified, weights)
    return judged


def _nearest(guess: Tensor, truth: Tensor) -> Tensor:
    """Return (N,) the row of the truth that is nearest to each guess in squares."""
    return torch.cdist(guess.flatten(1), truth.flatten(1)).argmin(1)


def _nearest_by_lpips(truth: Tensor, guess: Tensor, identified: Tensor, weights: Params) -> Tensor:
    """Return (N,) bool: True if LPIPS is far nearer to the own truth than to similar ones; only where identified."""
    gaps = torch.cdist(truth.flatten(1), truth.flatten(1)).fill_diagonal_(torch.inf)
    others = gaps.argsort(1)[:, : min(SIMILAR, len(truth) - 1)]
    hits = torch.zeros_like(identified)
    for row in identified.nonzero().flatten().tolist():
        compared = truth[torch.cat([torch.tensor([row]), others[row]])]
        distances = lpips(compared, guess[row].clamp(0, 1).expand_as(compared), weights).values
        hits[row] = bool(NEARER * distances[0] <= distances[1:].min())
    return hits


def _chance_level(matches: Sequence[MatchedPictures], nearest: Tensor) -> float:
    """Return the chance level of `identified`: the mean share over pairings of updates with each other's truths.

    Matching alone raises the share: for noise in batches of 100 to a third, not to one in 100. So every update's
    pictures are matched to the truths of several updates in turn, its own included, under the same rule. With one
    picture an update the level is 1 / (number of truths). With a single update nothing exceeds chance.
    """
    sizes = [len(pair.guess) for pair in matches]
    if max(sizes) == 1:
        return 1 / len(sizes)
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    truths = [torch.as_tensor(pair.truth) for pair in matches]
    hits = pairs = 0
    for shift in range(min(len(sizes), PAIRINGS)):
        for i, pair in enumerate(matches):
            j = (i + shift) % len(sizes)
            number = min(sizes[i], sizes[j])
            rows = match(truths[j][:number], pair.guess)
            theirs = nearest[first[i] + rows] == first[j] + torch.arange(number)
            hits += int((torch.as_tensor(pair.returned)[rows] & theirs).sum())
            pairs += number
    return hits / pairs


def share_by_target(hits: Tensor, sizes: Sequence[int]) -> Estimate:
    """Return a share of pictures with Wilson's 95 % interval for the effective number n of independent pictures.

    Pictures of one update are correlated. So n follows from the variance between targets:
    n = p (1 - p) (sum of sizes)^2 / sum over targets of (hits - p size)^2.
    n is at most the number of pictures. Without variance between targets n is the number of targets. With one picture
    a target n is the number of pictures.

    Example:
        >>> [round(end, 3) for end in share_by_target(torch.tensor([True, True, False, False]), [2, 2])[:3]]
        [0.5, 0.095, 0.905]
        >>> share_by_target(torch.tensor([True, False]), [1, 1]) == share_of(0.5, 2)
        True
    """
    p = float(hits.double().mean())
    deviations = [float(part.double().sum()) - p * len(part) for part in torch.split(hits, list(sizes))]
    spread = sum(deviation * deviation for deviation in deviations)
    effective = p * (1 - p) * hits.numel() ** 2 / spread if spread > 1e-12 else len(sizes)
    return share_of(p, min(effective, hits.numel()))


def fewest_updates() -> int:
    """Return the fewest updates at which pictures that are all identified are shown to be above chance.

    Of two updates the share 1 has the interval [.34, 1], and chance is a half.

    Example:
        >>> fewest_updates()
        3
    """
    return next(number for number in count(2) if share_of(1.0, number).low > 1 / number)


def _pictures(reconstruction: Reconstruction | None, knowledge: Knowledge) -> tuple[Tensor, Tensor]:
    """Return an attack's pictures as pixels on the CPU, and their labels, without non-finite or diverged ones."""
    if reconstruction is None:
        return torch.empty(0, *knowledge.input_shape, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    pixels = knowledge.pixels(reconstruction.batch.inputs).double().cpu()
    finite = pixels.isfinite().flatten(1).all(1) & math.isfinite(reconstruction.loss)
    return pixels[finite], reconstruction.batch.labels.cpu()[finite]


def with_extras(labels: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the labels with more extras."""
    return labels | {"extra": labels["extra"] | more}


def attack_labels(
    labels: dict[str, Any], extra: dict[str, Any], attack: Choice | None, weight: float | None = None
) -> dict[str, Any]:
    """Return the labels of an attack's rows: its name, if it adapts, and its weight of total variation.

    `weight` is the weight that the attacker chose; None: that of its settings.
    """
    instance = None if attack is None else attack.make()
    adaptive = None if instance is None else getattr(instance, "adaptive", "none") != "none"
    named = {"attack": None if attack is None else str(attack), "adaptive": adaptive}
    fixed = {"total_variation": getattr(instance, "tv", None)}
    chosen = {"total_variation": weight, "calibrated": True}
    return labels | named | {"extra": extra | (fixed if weight is None else chosen)}
