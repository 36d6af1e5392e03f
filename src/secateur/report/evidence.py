"""Evidence pack for a privacy officer: decision, worst attack, validity, and what was not tested, on a few pages.

The pack is one record. JSON (docs/evidence.schema.json), Markdown, a model card's section, HTML and PDF are its forms.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.catalogue import Method, methods, name_of
from secateur.config import PolicyFile, parse_fields, read_limits
from secateur.errors import WrongInput, install_command
from secateur.evaluation.gate import decide
from secateur.evaluation.limits import UNTESTED, Check, Evidence, Outcome, check_claims, collect, uses_shadows
from secateur.evaluation.validity import METRIC, count_shadows
from secateur.models.formats import is_brought
from secateur.report.headline import list_checks
from secateur.report.table import WORST, name_measure
from secateur.report.verdict import BARE, describe_unmet
from secateur.runs.artifacts import version, write
from secateur.runs.folder import load_config, load_figures, load_marker, load_rows
from secateur.runs.rows import Row

if TYPE_CHECKING:
    import jinja2

FORMATS = ("html", "pdf", "md", "json", "model-card")
MEASURES = ("auc", "tpr_at_fpr_0.01", "tpr_at_fpr_0.001")
TITLES = {"auc": "AUC", "tpr_at_fpr_0.01": "TPR at 1 % FPR", "tpr_at_fpr_0.001": "TPR at 0.1 % FPR"}
HEAD = ["measure", "model", "attack", "value", "95 % interval", "covers"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ASKING = ("blindmi", "label-only", "samia")  # attacks that ask about inputs of their own
# Threats that no attack of this tool covers, in the words of NIST AI 100-2.
NO_ATTACK = "Secateur has no such attack"
UNCOVERED = (
    f"property inference, facts about the training population as a whole: {NO_ATTACK}",
    f"model extraction: {NO_ATTACK}; it copies the model, not its training data",
    f"poisoning of the training data to make it leak more: {NO_ATTACK}; it needs a hand in the training",
    f"white-box membership inference: {NO_ATTACK}; attacks here only ask the model",
)


@dataclass(frozen=True)
class MeasuredLeak:
    """A measure of one model under its strongest attack, with the ends of its 95 % interval."""

    measure: str
    model: str
    attack: str | None
    value: float
    low: float
    high: float
    covers: str  # what the interval covers: rows, or rows and trainings


@dataclass(frozen=True)
class Decided:
    """One limit of the policy and its answer."""

    model: str
    measure: str
    limit: float
    outcome: str
    sentence: str


@dataclass(frozen=True)
class Adversary:
    """An attack in the words of NIST AI 100-2: goal, capability and knowledge, with its cost."""

    name: str
    goal: str
    capability: str
    knowledge: str
    models: int  # that the attacker trained


@dataclass(frozen=True)
class ValidityCheck:
    """A check of the audit's own validity."""

    name: str
    holds: bool
    sentence: str


@dataclass(frozen=True)
class EvidencePack:
    """All that a privacy officer signs for."""

    schema: int
    created: str
    outcome: str  # within, above, inconclusive, or undecided without a policy
    sentence: str
    policy: dict[str, Any] | None
    checks: list[Decided]
    subject: dict[str, Any]  # model and data with their hashes, and the rows that were asked about
    worst: list[MeasuredLeak]
    before: list[MeasuredLeak]  # the same measures of the model before compression
    groups: list[MeasuredLeak]
    adversaries: list[Adversary]
    hours: float | None
    validity: list[ValidityCheck]
    not_tested: list[str]
    provenance: dict[str, Any] = field(default_factory=dict)


def build_pack(folder: Path, policy: PolicyFile | None = None, today: date | None = None) -> EvidencePack:
    """Return the evidence of a finished audit, decided against a policy, or else against the run's own limits."""
    rows = load_rows(folder)
    text, marker, claims = load_config(folder), load_marker(folder), check_claims(rows)
    config, limits = parse_fields("run", text), read_limits(text)
    if policy is None and (limits.by_measure() or any(item.outcome is Outcome.ABOVE for item in claims)):
        policy = PolicyFile(name="limits of the run file", limits=limits)
    gate = None if policy is None else decide({folder.name: rows}, policy, today=today)
    items = collect(rows, MEASURES)
    originals = collect([row for row in rows if row.pruner == "none"], MEASURES)
    compressed = {item.subject for item in items} - {item.subject for item in originals}
    attacks = list(dict.fromkeys(row.attack for row in rows if row.attack and row.value is not None))
    return EvidencePack(
        schema=1,
        created=(today or date.today()).isoformat(),
        outcome="undecided" if gate is None else str(gate.outcome),
        sentence="No policy was given, so nothing is decided." if gate is None else gate.sentence,
        policy=None
        if policy is None
        else policy.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"schema_version"}),
        checks=_list_decided(claims if gate is None else gate.checks[folder.name]),
        subject=_subject(rows, config),
        worst=_select_strongest(items),
        before=_select_strongest(originals) if compressed else [],
        groups=_select_strongest(collect(rows, ("worst_group_auc", "worst_group_tpr_at_fpr_0.01"))),
        adversaries=[_adversary(attack, config, rows) for attack in attacks],
        hours=_hours(marker),
        validity=[ValidityCheck(*item) for item in list_checks(rows)],
        not_tested=_list_untested(rows, attacks, config),
        provenance={name: marker.get(name) for name in ("secateur", "python", "torch", "device", "started", "finished")}
        | {"command": marker.get("command") or f"secateur audit {folder / 'config.yaml'}"}
        | {"seeds": marker.get("seeds"), "tool": version()},
    )


def write_pack(folder: Path, formats: Sequence[str], policy: PolicyFile | None = None) -> list[Path]:
    """Write the evidence of a run into its folder, in each of the formats; return the files."""
    pack, written = build_pack(folder, policy), []
    for name in formats:
        if name not in FORMATS:
            raise WrongInput("format", f"{name!r} is not known; allowed: {', '.join(FORMATS)}")
        if name == "pdf":
            page = render_html(pack, load_figures(folder))
            written.append(_write_pdf(folder / "evidence.pdf", page))
            continue
        text = {
            "html": lambda: render_html(pack, load_figures(folder)),
            "md": lambda: render_markdown(pack),
            "json": lambda: json.dumps(dataclasses.asdict(pack), indent=2) + "\n",
            "model-card": lambda: render_model_card(pack),
        }[name]()
        path = folder / {"model-card": "model-card.md"}.get(name, f"evidence.{name}")
        write(path, text.encode())
        written.append(path)
    return written


def render_markdown(pack: EvidencePack) -> str:
    """Return the pack as Markdown."""
    lines = ["# Evidence of what this model leaks", "", f"**{pack.outcome.upper()}.** {pack.sentence}", ""]
    if pack.policy:
        lines += _table(["policy", ""], [[name, _format_plain(value)] for name, value in pack.policy.items()])
    if pack.checks:
        lines += _table(
            ["model", "measure", "limit", "result"],
            [[item.model, item.measure, f"{item.limit:g}", item.outcome] for item in pack.checks],
        )
    lines += ["## What was audited", ""]
    lines += _table(["", ""], [[name, _format_plain(value)] for name, value in pack.subject.items()])
    lines += ["## The strongest attack for each measure", "", *_table(HEAD, _build_cells(pack.worst))]
    if pack.before:
        lines += ["## Before compression", "", *_table(HEAD, _build_cells(pack.before))]
    if pack.groups:
        lines += ["## The most exposed group", "", *_table(HEAD, _build_cells(pack.groups))]
    lines += ["## Attackers (NIST AI 100-2)", ""]
    adversaries = [[a.name, a.goal, a.capability, a.knowledge, str(a.models)] for a in pack.adversaries]
    lines += _table(["attack", "goal", "capability", "knowledge", "models trained"], adversaries)
    lines += [f"All training and attacks took {pack.hours:.2g} hours.", ""] if pack.hours is not None else []
    lines += ["## Validity of the audit", ""]
    lines += [f"- {'holds' if item.holds else '**does not hold**'}: {item.sentence}" for item in pack.validity]
    lines += ["", "## What was not tested", ""] + [f"- {sentence}" for sentence in pack.not_tested]
    lines += ["", "## Provenance", ""]
    lines += _table(["", ""], [[name, _format_plain(value)] for name, value in pack.provenance.items()])
    return "\n".join(lines).rstrip() + "\n"


def render_model_card(pack: EvidencePack) -> str:
    """Return the section on privacy of a model card."""
    lines = [
        "## Privacy: membership leakage",
        "",
        f"{pack.sentence} Audited {pack.created} with Secateur {version()}.",
        "",
    ]
    lines += _table(HEAD, _build_cells(pack.worst))
    failed = [item.sentence for item in pack.validity if not item.holds]
    lines += [f"- Validity: {sentence}" for sentence in failed]
    lines += [f"- Not tested: {sentence}" for sentence in pack.not_tested]
    return "\n".join(lines).rstrip() + "\n"


def render_html(pack: EvidencePack, figures: Sequence[dict[str, Any]] = ()) -> str:
    """Return the pack as one page for a printer, with the ROC curves of the audited models as SVG."""
    curves = [figure for figure in figures if figure.get("kind") == "roc" and figure.get("pruner") != "none"]
    return _evidence_template().render(
        pack=pack,
        head=HEAD,
        worst=_build_cells(pack.worst),
        before=_build_cells(pack.before),
        groups=_build_cells(pack.groups),
        curves=[(figure["attack"], _points(figure)) for figure in curves[:6]],
    )


@cache
def _evidence_template() -> jinja2.Template:
    """Return the template, with its filter."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("secateur", "report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["plain"] = _format_plain
    return environment.get_template("evidence.html.j2")


def _list_decided(checks: Sequence[Check]) -> list[Decided]:
    return [Decided(c.subject, c.measure, c.limit, str(c.outcome), c.sentence) for c in checks]


def _select_strongest(items: Sequence[Evidence]) -> list[MeasuredLeak]:
    """Return each measure under the attack and on the model where it is highest."""
    strongest = []
    for measure in dict.fromkeys(item.measure for item in items):
        known = [item for item in items if item.measure == measure and item.supported]
        if known:
            top = max(known, key=lambda item: item.estimate.value if item.estimate else 0.0)
            assert top.estimate is not None
            covers = f"rows and {top.trainings} trainings" if top.trainings > 1 else "rows of one training"
            group = f" ({top.note.partition(';')[0]})" if measure.startswith(WORST) and top.note else ""
            strongest.append(MeasuredLeak(measure, top.subject + group, top.attack, *top.estimate[:3], covers))
    return strongest


def _subject(rows: Sequence[Row], config: dict[str, Any]) -> dict[str, Any]:
    """Return facts about model and data: names, hashes of files, and the numbers of rows."""
    facts: dict[str, Any] = {"model": rows[0].model if rows else None, "data": rows[0].dataset if rows else None}
    for name in ("weights", "data", "population", "predictions"):
        path = Path(str(config.get(name) or ""))
        if config.get(name) and path.is_file():
            facts[f"sha256 of {name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    for name in ("members", "nonmembers"):
        counts = [row.value for row in rows if row.metric == name and row.value is not None]
        if counts:
            facts[f"{name} asked about"] = int(counts[0])
    if config.get("pruner") and not config.get("predictions"):
        facts["pruner"], facts["sparsity"] = config.get("pruner"), config.get("sparsity")
    return {name: value for name, value in facts.items() if value not in (None, [], "")}


def _count_models(attack: str, config: dict[str, Any], rows: Sequence[Row]) -> int:
    """Return the number of models that an attack compares with the audited one."""
    if not uses_shadows(attack):
        return 0
    if config.get("predictions"):
        return count_shadows(rows)  # those of the file
    shadows, in_out = (int(config.get(name) or 0) for name in ("shadows", "in_out"))
    either = methods("attack")[name_of(attack)].info["shadows"] == "in-out or disjoint"
    return in_out if in_out and (either or not shadows) else shadows


def _adversary(attack: str, config: dict[str, Any], rows: Sequence[Row]) -> Adversary:
    """Return an attack in the words of NIST AI 100-2."""
    entry: Method | None = methods("attack").get(name_of(attack))
    sees = entry.info["sees"] if entry else "probabilities"
    shadowed = uses_shadows(attack)
    knowledge = "the record and its label; data of the same population, and the training recipe"
    return Adversary(
        attack,
        "privacy compromise: membership inference",
        f"query access to the model's {sees}",
        knowledge if shadowed else "the record and its label",
        _count_models(attack, config, rows),
    )


def _list_untested(rows: Sequence[Row], attacks: Sequence[str], config: dict[str, Any]) -> list[str]:
    """Return what the audit leaves open, each with its reason."""
    run = {name_of(attack) for attack in attacks}
    refused = {str(row.attack): row.note for row in rows if row.attack and row.metric == "auc" and row.value is None}
    sentences = [f"{attack}: {note}" for attack, note in sorted(refused.items())]
    reasons: dict[str, list[str]] = {}
    for name, entry in methods("attack").items():
        if name not in run | {name_of(attack) for attack in refused}:
            reasons.setdefault(_explain_absence(entry, rows, config), []).append(name)
    sentences += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if not any(uses_shadows(attack) for attack in attacks):
        reason = "the audit had no shadow models" if not _has_shadows(rows, config) else "none was chosen"
        sentences.append(f"attackers with shadow models, which are stronger: {reason}")
    if len({row.seed for row in rows}) == 1:
        sentences.append(f"another training with the same recipe: {_explain_one_seed(config)}")
    unmet = [sentence.removesuffix(".") for sentence in describe_unmet(rows, lambda row: str(row.defense))]
    if not unmet and not config.get("adaptive") and any(row.defense not in (*BARE, None, "basic") for row in rows):
        unmet = ["attackers whose shadow models use the defense too: the run is not adaptive"]  # notes of older runs
    sentences += unmet
    partly = [row for row in rows if row.metric == "epsilon" and UNTESTED in (row.note or "")]
    sentences += sorted({f"the epsilon that {row.defense} proves: {row.note}" for row in partly})
    checked = {row.extra.get("check") for row in rows if row.metric == METRIC}
    if "blind" not in checked:
        sentences.append("whether members and non-members differ by themselves: the inputs were not there")
    return [*sentences, *UNCOVERED]


def _has_shadows(rows: Sequence[Row], config: dict[str, Any]) -> bool:
    """Return True if the attacker of a run has shadow models."""
    can_train = not config.get("predictions") and (not config.get("weights") or bool(config.get("train")))
    wanted = bool(config.get("shadows") or config.get("in_out"))
    return count_shadows(rows) > 0 or (can_train and wanted and not is_brought(str(config.get("model") or "")))


def _explain_absence(entry: Method, rows: Sequence[Row], config: dict[str, Any]) -> str:
    """Return why an attack was not run, where the run has no row that says it."""
    if config.get("predictions") and entry.name in ASKING:
        return "ask the model new questions, which saved predictions cannot answer"
    if entry.info["shadows"] not in ("none", "for a threshold") and not _has_shadows(rows, config):
        return "need shadow models, which the audit did not have"
    return "are not among the attacks that were chosen for this run"


def _explain_one_seed(config: dict[str, Any]) -> str:
    """Return why all numbers are of one training."""
    if config.get("predictions") or config.get("weights") or is_brought(str(config.get("model") or "")):
        return "one trained model was given, so all numbers are of one seed"
    return "the run has one seed"


def _hours(marker: dict[str, Any]) -> float | None:
    try:
        start, end = (datetime.fromisoformat(marker[name]) for name in ("started", "finished"))
    except (KeyError, TypeError, ValueError):
        return None
    return (end - start).total_seconds() / 3600


def _build_cells(items: Sequence[MeasuredLeak]) -> list[list[str]]:
    return [
        [
            TITLES.get(item.measure, name_measure(item.measure)),
            item.model,
            item.attack or "",
            f"{item.value:.3f}",
            f"{item.low:.3f} to {item.high:.3f}",
            item.covers,
        ]
        for item in items
    ]


def _points(figure: dict[str, Any]) -> str:
    """Return a ROC curve as points of an SVG polyline of 200 x 200."""
    pairs = zip(figure["fpr"], figure["tpr"], strict=True)
    return " ".join(f"{200 * fpr:.1f},{200 * (1 - tpr):.1f}" for fpr, tpr in pairs)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *body)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def _format_plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format_plain(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _write_pdf(path: Path, page: str) -> Path:
    """Print the page with a browser, or with WeasyPrint where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is not None:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "evidence.html", Path(folder) / "evidence.pdf"
            source.write_text(page, encoding="utf-8")
            command = [browser, "--headless", "--disable-gpu", "--no-pdf-header-footer"]
            command += ["--no-sandbox"] if os.geteuid() == 0 else []  # a browser of root starts only so
            command += [f"--user-data-dir={folder}/profile", f"--print-to-pdf={target}", source.as_uri()]
            subprocess.run(command, capture_output=True, timeout=120, check=False)
            if target.is_file():
                write(path, target.read_bytes())
                return path
    try:
        import weasyprint
    except (ImportError, OSError):
        advice = f"install Chromium, or: {install_command('pdf')}"
        raise WrongInput("format", f"pdf needs a browser or WeasyPrint, and neither works here; {advice}") from None
    weasyprint.HTML(string=page).write_pdf(path)
    return path
