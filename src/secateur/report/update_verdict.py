"""Verdicts on updates: one for each defense, and one for each federation, with its badge and its sentences.

A defense is green only if nothing was recognised by every attacker that is known to be strong against it. These have
all iterations of their papers, a weight of total variation that suits the pictures, and enough updates. Otherwise it
is inconclusive, and the verdict lists the missing evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from secateur.attacks.inversion.adaptive import PLAIN
from secateur.evaluation.attack_strength import Strength, list_missing, measure_strength
from secateur.evaluation.limits import LEVEL
from secateur.evaluation.reconstruction import COSINE, NOT_RUN
from secateur.metrics.estimates import average_on_same, holm, p_above
from secateur.metrics.membership import share_of
from secateur.report import federation, inversion, summary
from secateur.report.inversion import name_defense
from secateur.report.summary import Labels, SummaryLine, group_by
from secateur.report.table import format_measure
from secateur.report.verdict import GUESSING, Badge
from secateur.runs.rows import Row

JUDGES = {"squares": "by squared error", "denoised": "after a light denoiser", "lpips": "by LPIPS"}


@dataclass(frozen=True)
class UpdateVerdict:
    """Verdict on one defense, or on one federation."""

    subject: str
    badge: Badge
    sentences: list[str]

    @property
    def text(self) -> str:
        """The verdict as one paragraph."""
        return " ".join([f"{self.subject}: {self.badge.text}.", *self.sentences])


@dataclass(frozen=True)
class Attacker:
    """One attack on one defense: its lines, one or more for each attacked update."""

    name: str
    lines: Sequence[SummaryLine]
    counted: list[SummaryLine] = field(init=False)  # without lines that pool updates with lines of their own

    def __post_init__(self) -> None:
        alone = [line for line in self.lines if not _pools(line)]
        object.__setattr__(self, "counted", alone or list(self.lines))

    @property
    def strength(self) -> Strength:
        """The strength of the attack."""
        return measure_strength(self.name, [row for line in self.lines for row in line.rows])

    @property
    def failed(self) -> float:
        """The largest share of targets without a result."""
        return max((line.value("failed") or 0.0 for line in self.lines), default=0.0)

    @property
    def refusal(self) -> str | None:
        """The reason why the attack was not run, if it was not."""
        notes = [cell.note for line in self.lines if (cell := line.cells.get("psnr")) and cell.note]
        return next((note for note in notes if note.startswith(NOT_RUN)), None)

    @property
    def scored(self) -> bool:
        """True if there was a truth to compare with."""
        return any("recognisable" in line.cells for line in self.lines)

    def total(self, metric: str) -> int:
        """Return a count over all updates and seeds."""
        return round(sum(row.value or 0 for line in self.counted for row in line.rows if row.metric == metric))

    def average(self, metric: str) -> float | None:
        """Return the mean of a measure over the pictures of all updates and seeds; None if there is none."""
        values = []
        for line in self.counted:
            for rows in group_by(line.rows, lambda row: row.seed).values():
                measures = {row.metric: row.value for row in rows}
                if (value := measures.get(metric)) is not None:
                    values.append((value, measures.get("pictures") or 1))
        return sum(value * count for value, count in values) / sum(count for _, count in values) if values else None

    @property
    def recognised(self) -> int:
        """The number of recognisable pictures; at least one where a share is above 0."""
        count = 0.0
        for line in self.counted:
            for rows in group_by(line.rows, lambda row: row.seed).values():
                values = {row.metric: row.value or 0.0 for row in rows}
                share = values.get("recognisable", 0.0)
                count += max(share * values.get("pictures", 1), 1.0 if share else 0.0)
        return round(count)

    @property
    def above_chance(self) -> SummaryLine | None:
        """The line whose pictures are nearest to their own truths more often than by chance, if there is one."""
        lines = [line for line in self.lines if _above_chance(line)]
        return max(lines, key=lambda line: line.rank("identified"), default=None)

    @property
    def shows(self) -> bool:
        """True if a picture is recognisable, or more than chance are nearest to their own truths."""
        return bool(self.recognised) or self.above_chance is not None


def judge_updates(rows: Sequence[Row]) -> list[UpdateVerdict]:
    """Return a verdict for each defense whose updates were attacked outside a federation."""
    rows = [row for row in rows if not federation.is_federated(row)]
    lines = inversion.summarise_attacks(rows)
    groups = group_by(lines, lambda line: (_setting(line.labels), _defense(line.labels)))
    several = len({setting for setting, _ in groups}) > 1
    guarantees = group_by((row for row in rows if row.metric == "epsilon"), lambda row: str(row.defense))
    verdicts = []
    for (setting, defense), same in groups.items():
        subject = "no defense" if defense == "none" else defense
        promised = _describe_guarantee(guarantees.get(str(same[0].labels.get("defense")), []))
        badge, sentences = _judge(same, str(same[0].labels.get("defense")))
        sentences = [*_describe_changes(rows, str(same[0].labels.get("defense"))), *sentences, *promised]
        verdicts.append(UpdateVerdict(f"{setting}: {subject}" if several else subject, badge, sentences))
    return verdicts


def judge_federations(rows: Sequence[Row]) -> list[UpdateVerdict]:
    """Return a verdict for each federation: pictures of its updates, members, and the promised epsilon."""
    federations = federation.summarise_federations(rows)
    names = federation.shorten_names(line.labels for line in federations)
    several = len({summary.name_setting(line.labels) for line in federations}) > 1
    verdicts = []
    for line in federations:
        attacks = inversion.summarise_attacks(line.rows)
        defense = str(line.labels["defense"])
        judged = [_judge(attacks, defense)] if attacks else []
        if asked := [row for row in line.rows if row.metric == "auc" and row.attack is not None]:
            judged.append(_judge_membership(asked))
        badges = [badge for badge, _ in judged]
        judged.sort(key=lambda part: part[0].colour != "bad")  # a leak comes first
        sentences = [sentence for _, words in judged for sentence in words]
        sentences += _describe_guarantee([row for row in line.rows if row.extra.get("client") is None])
        subject = names[federation.name_federation(line.labels)]
        subject = f"{summary.name_setting(line.labels)}: {subject}" if several else subject
        verdicts.append(UpdateVerdict(subject, _join_badges(badges), sentences or [NOT_ATTACKED]))
    return verdicts


NOT_ATTACKED = "No attack was run: it is unknown how much its updates reveal."


def _join_badges(badges: Sequence[Badge]) -> Badge:
    """Return the worst badge of all attacks on a federation."""
    order = ("bad", "doubtful", "good")
    return min(badges, key=lambda badge: order.index(badge.colour), default=Badge("Not attacked", "doubtful"))


def _judge_membership(rows: Sequence[Row]) -> tuple[Badge, list[str]]:
    """Judge the membership attacks on a federation's clients by the strongest, over all attacked rounds."""
    attacks = group_by([row for row in rows if row.value is not None], lambda row: str(row.attack))
    if not attacks:
        reason = next((row.note for row in rows if row.note), "it could not be measured")
        return Badge("Inconclusive", "doubtful"), [f"Membership was not measured: {reason}."]
    estimates = {name: average_on_same([summary.estimate(row) for row in same]) for name, same in attacks.items()}
    name, best = max(estimates.items(), key=lambda item: item[1].value)
    leaks = any(p <= LEVEL for p in holm([p_above(estimate, GUESSING) for estimate in estimates.values()]))
    shown = f"Members: {name} reaches an AUC of {best.value:.3f} [{best.low:.3f}, {best.high:.3f}]; guessing has .5."
    text = "Members are recognised" if leaks else "Inconclusive"
    doubt = [] if leaks else ["That is no proof of safety: a stronger attack may see more."]
    return Badge(text, "bad" if leaks else "doubtful"), [shown, *doubt]


def _judge(lines: Sequence[SummaryLine], defense: str) -> tuple[Badge, list[str]]:
    """Judge one defense by all attacks that it met."""
    attackers = [
        Attacker(name, same) for name, same in group_by(lines, lambda line: str(line.labels["attack"])).items()
    ]
    absent = [f"{attacker.name} was {attacker.refusal}." for attacker in attackers if attacker.refusal]
    attackers = [attacker for attacker in attackers if not attacker.refusal]
    if not attackers:
        return Badge("Nothing was measured", "doubtful"), absent
    failures = _describe_failures(attackers)
    if all(attacker.failed >= 1 for attacker in attackers):
        return Badge("Nothing was measured", "doubtful"), failures
    scored = [attacker for attacker in attackers if attacker.scored and attacker.failed < 1]
    base = next((row.extra.get("base_pruning", "") for line in lines for row in line.rows), "")
    if not scored:
        unseen = "There is no truth to compare with: look at the pictures."
        missing = list_missing([attacker.strength for attacker in attackers], defense, base)
        limits = [f"Missing: {'; '.join(missing)}."] if missing else []
        return Badge("Look at the pictures", "doubtful"), [unseen, *limits, *failures]
    sentences = [*_describe_pictures(scored), *_describe_labels(scored), *absent]
    seen = [attacker for attacker in scored if attacker.shows]
    if seen:
        recognised = any(attacker.recognised for attacker in seen)
        text = "Training pictures are recognisable" if recognised else "Pictures are told apart better than by chance"
        plain = [attacker for attacker in scored if attacker.strength.mode == PLAIN]
        if plain and not any(attacker.shows for attacker in plain):
            names = ", ".join(attacker.name for attacker in seen)
            sentences.append(f"It stands only against the plain attacker, not against {names}.")
        return Badge(text, "bad"), sentences + failures + _describe_stage(lines)
    missing = list_missing([attacker.strength for attacker in scored], defense, base) + failures
    if missing:
        return Badge("Inconclusive", "doubtful"), [
            *sentences,
            f"Missing: {'; '.join(missing)}.",
            *_describe_stage(lines),
        ]
    return Badge("No picture was recognised, by these attackers", "good"), sentences + _describe_stage(lines)


def _describe_changes(rows: Sequence[Row], defense: str) -> list[str]:
    """Return a sentence for each reason why a defense was not applied, or changed nothing, in some updates."""
    compared = [row for row in rows if row.metric == COSINE and row.defense == defense]
    reasons = group_by((row for row in compared if row.note), lambda row: str(row.note))
    many = f"of {len(compared)} update{'s' if len(compared) != 1 else ''}"
    return [f"In {len(same)} {many} {reason}." for reason, same in reasons.items()]


def _describe_pictures(attackers: Sequence[Attacker]) -> list[str]:
    """Return how many pictures are recognisable to whom, how similar they are, and how many are told apart."""
    best = max(attackers, key=lambda attacker: (attacker.recognised, _extreme(attacker, "psnr_max", max) or 0.0))
    pictures, updates = best.total("pictures"), best.total("updates")
    many = f"{pictures:,} picture{'s' if pictures != 1 else ''} of {updates:,} update{'s' if updates != 1 else ''}"
    many = many if pictures else "the pictures"  # a run of an earlier version does not count them
    if best.recognised:
        judges = [words for name, words in JUDGES.items() if _extreme(best, f"recognisable_{name}", max)]
        by = f" ({', '.join(judges)})" if judges else ""
        sentences = [
            f"{best.recognised:,} of {many} {'is' if best.recognised == 1 else 'are'} recognisable to {best.name}{by}."
        ]
    else:
        bound = share_of(0.0, updates).high if updates else 1.0
        names = ", ".join(attacker.name for attacker in attackers)
        sentences = [f"None of {many} is recognisable to {names}; with 95 % confidence up to {bound:.0%} may be."]
    sentences += _describe_psnr(best)
    apart = [line for attacker in attackers if not attacker.recognised and (line := attacker.above_chance)]
    if apart and not best.recognised:
        line = max(apart, key=lambda line: line.rank("identified"))
        share, chance = _format(line, "identified"), _format(line, "identified_chance")
        sentences.append(
            f"{line.labels['attack']}: {share} of its pictures are nearest to their own truth; chance: {chance}."
        )
    return sentences


def _describe_psnr(attacker: Attacker) -> list[str]:
    """Return the PSNR of an attack's pictures beside that of grey ones, both over the same pictures."""
    low, high = _extreme(attacker, "psnr_min", min), _extreme(attacker, "psnr_max", max)
    if low is None or high is None:
        return []
    first, many = attacker.counted[0], len(attacker.counted) > 1
    middle = ""
    if many and (mean := attacker.average("psnr")) is not None:
        middle = f"{mean:.1f} dB on average, "
    elif not many and "psnr_median" in first.cells:
        middle = f"{_format(first, 'psnr_median')} in the median, "
    grey = attacker.average("psnr_grey")
    known = "" if grey is None else f"; a grey picture has {grey:.1f} dB{' on average' if many else ''}"
    return [f"The PSNR of {attacker.name} is {middle}from {low:.1f} to {high:.1f} dB{known}."]


def _describe_labels(attackers: Sequence[Attacker]) -> list[str]:
    """Return the largest share of labels that an attack finds, over all its pictures."""
    shares = {
        attacker.name: share for attacker in attackers if (share := attacker.average("label_accuracy")) is not None
    }
    if not shares:
        return []
    name = max(shares, key=lambda name: shares[name])
    return [f"{name} finds {shares[name]:.1%} of the labels."]


def _describe_failures(attackers: Iterable[Attacker]) -> list[str]:
    """Return a sentence for each attack that failed on targets, where nothing was measured."""
    sentences = []
    for attacker in attackers:
        if share := attacker.failed:
            targets = "every target" if share >= 1 else f"{share:.0%} of its targets"
            reason = "no picture was returned, or all trials diverged"
            sentences.append(f"{attacker.name} failed on {targets} ({reason}): nothing was measured there.")
    return sentences


def _describe_stage(lines: Sequence[SummaryLine]) -> list[str]:
    untrained = all(line.labels.get("stage") == "untrained" for line in lines)
    return ["The model was untrained, where updates reveal most."] if untrained else []


def _describe_guarantee(rows: Iterable[Row]) -> list[str]:
    """Return the epsilon that a defense promises: of the last round that has one."""
    promised = [row for row in rows if row.metric == "epsilon" and row.attack is None and row.value is not None]
    if not promised:
        return []
    last = max(promised, key=lambda row: row.extra.get("round", 0))
    return [f"Its promise: {last.note}." if last.note else f"It promises epsilon {last.value:.3g}."]


def _setting(labels: Labels) -> str:
    """Return the attacked network, data and batches; those of a federation's rounds are one setting."""
    fixed = labels if labels.get("round") is None else {**labels, "stage": None, "batch_size": 1}
    return inversion.name_comparison(fixed)


def _defense(labels: Mapping[str, Any]) -> str:
    return name_defense({**labels, "against": None})


def _pools(line: SummaryLine) -> bool:
    """Return True if a line joins the clients of a round, which also have lines of their own."""
    return line.labels.get("client") is None and line.labels.get("attacked", 1) > 1


def _above_chance(line: SummaryLine) -> bool:
    """Return True if the low end of the share that is nearest to its own truth is above chance; both must be known."""
    cell, chance = line.cells.get("identified"), line.value("identified_chance")
    low = None if cell is None else cell.value if cell.low is None else cell.low
    return low is not None and chance is not None and low > chance


def _extreme(attacker: Attacker, metric: str, pick: Any) -> float | None:
    values = [value for line in attacker.counted if (value := line.value(metric)) is not None]
    return pick(values) if values else None


def _format(line: SummaryLine, metric: str) -> str:
    return format_measure(line.cells.get(metric), metric, interval=False)
