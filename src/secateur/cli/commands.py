"""The command line: parses, calls, prints; no logic. Heavy imports wait until a command runs."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secateur.cli.exits import Exit, guard
from secateur.cli.options import Command, RecommendCommand, RunCommand, Set, say
from secateur.errors import WrongInput, unknown

if TYPE_CHECKING:
    from secateur.config import Audit, AuditApp, Federate, Invert, Limits, Prune, Reproduce, SearchFields, Sweep
    from secateur.evaluation.limits import Check
    from secateur.runs.rows import Row

Out = Annotated[Path, typer.Option(help="Folder of the run. Rerun the same command to resume.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the input and print the plan, but run nothing.")]
Junit = Annotated[Path | None, typer.Option(help="JUnit file of the checked limits, for a CI server.")]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as one JSON array on standard output.")]


app = typer.Typer(
    name="secateur",
    help="Measure what a compressed neural network gives away about its training data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command, run_command = partial(app.command, cls=Command), partial(app.command, cls=RunCommand)
STRONGER = "A stronger answer needs shadow models, which attacks such as lira compare with yours: "
TRAINED = "set how your model was trained, by --set train.epochs=N or by --set train.function=module:function."
ASKED = "pass them to secateur.audit(..., shadows=[...]) in Python, or bring structure, weights and recipe."
KINDS = ("attacks", "defenses", "pruners", "base-prunings", "submodels", "models", "datasets", "studies")


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Measure what a compressed neural network gives away about its training data."""
    if version:
        from secateur.runs.artifacts import version as version_of

        typer.echo(version_of())
        raise typer.Exit


@run_command()
def audit(
    ctx: typer.Context,
    out: Out = Path("runs/audit"),
    junit: Junit = None,
    export: Annotated[Path | None, typer.Option(help="Folder that the audited models are written to.")] = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Train, prune, fine-tune and attack: how much does each pruned model leak?

    FILE.yaml is a run file; flags override its fields.
    """
    from secateur.experiments.audit import plan, run_audit
    from secateur.experiments.black_box import can_only_be_asked, run_black_box
    from secateur.experiments.predictions import run_predictions
    from secateur.report.terminal import print_audit

    settings: Audit = ctx.obj
    if dry_run:
        say(*plan(settings))
        return
    _check_outputs(junit, export)
    is_asked = False
    if settings.predictions is not None:
        rows = run_predictions(settings, settings.predictions, out)
    elif is_asked := can_only_be_asked(settings):
        rows = run_black_box(settings, out)
    else:
        rows = run_audit(settings, out, export)
    checks = _check_limits(rows, settings.limits)
    _print(rows, json_, partial(print_audit, limits=checks), f"the page: {out / 'report.html'}")
    if (is_asked or not settings.trains_shadows) and not json_:
        say(STRONGER + (ASKED if settings.weights is None else TRAINED))
    _hold(checks, junit)


@run_command()
def invert(
    ctx: typer.Context,
    out: Out = Path("runs/invert"),
    junit: Junit = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Reconstruct training pictures from a client's update: how much does one update leak?

    FILE.yaml is a run file; flags override its fields.
    """
    from secateur.experiments.invert import plan, run_invert
    from secateur.report.terminal import print_inversion

    settings: Invert = ctx.obj
    if dry_run:
        say(*plan(settings))
        return
    _check_writable(junit)
    _answer(run_invert(settings, out), settings.limits, out, print_inversion, json_, junit)


@run_command()
def federate(
    ctx: typer.Context,
    out: Out = Path("runs/federate"),
    junit: Junit = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Train a pruned federation, and attack its clients' updates from inside.

    FILE.yaml is a run file; flags override its fields.
    """
    from secateur.experiments.federate import plan, run_federate
    from secateur.report.terminal import print_federation

    settings: Federate = ctx.obj
    if dry_run:
        say(*plan(settings))
        return
    _check_writable(junit)
    _answer(run_federate(settings, out), settings.limits, out, print_federation, json_, junit)


@run_command(name="audit-app")
def audit_app(
    ctx: typer.Context,
    out: Out = Path("runs/audit-app"),
    junit: Junit = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Run an existing Flower app in simulation, and attack its clients' updates: what does its server see?

    FOLDER has the app: its pyproject.toml, its code. The code is run as it is.
    """
    from secateur.experiments.audit_app import plan, run_audit_app
    from secateur.report.terminal import print_federation

    settings: AuditApp = ctx.obj
    if dry_run:
        say(*plan(settings))
        return
    _check_writable(junit)
    _answer(run_audit_app(settings, out), settings.limits, out, print_federation, json_, junit)


@command()
def gate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    policy: Annotated[Path, typer.Option(help="Policy file (YAML): limits, who set them, and until when they hold.")],
    baseline: Annotated[Path | None, typer.Option(help="Run of the last release; worse than it fails.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Markdown file for a pull request.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="SARIF file of the checks, for a code host.")] = None,
    junit: Annotated[Path | None, typer.Option(help="JUnit file of the checks, for a CI server.")] = None,
) -> None:
    """Decide from finished runs: do they hold a policy, and are they no worse than the last release?

    RUN is the folder of a finished run. Exit code 0: within the limits, 1: above one, 3: inconclusive.
    """
    from datetime import date

    from secateur.config import PolicyFile, read
    from secateur.evaluation import gate as gates
    from secateur.evaluation import limits
    from secateur.runs.artifacts import version, write
    from secateur.runs.folder import explain_damage, load_finished

    for file in (summary, sarif, junit):
        _check_writable(file)
    rules = read(PolicyFile, policy, {})
    rows = {str(run): load_finished(run) for run in runs}
    before = None if baseline is None else load_finished(baseline)
    with explain_damage(runs if baseline is None else [*runs, baseline]):
        decision = gates.decide(rows, rules, before, date.today())
        checks = [check for checked in decision.checks.values() for check in checked]
        sentences = gates.render_markdown(decision)
        contents = {summary: sentences, sarif: gates.sarif(decision, version()), junit: limits.junit(checks)}
    for file, text in contents.items():
        if file is not None:
            write(file, text.encode())
    typer.echo(sentences, nl=False)
    _end(decision.outcome)


@run_command()
def prune(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="File of the pruned model.")] = Path("model.safetensors"),
    json_: Json = False,
) -> None:
    """Write a pruned, fine-tuned model: .safetensors with the recipe that made it.

    FILE.yaml is a run file; flags override its fields.
    """
    from secateur.experiments.prune import run_prune
    from secateur.report.terminal import print_measures

    settings: Prune = ctx.obj
    model = f"the model: {out}" + ("; not the one that an audit attacks" if settings.rows == "all" else "")
    _print(run_prune(settings, out), json_, print_measures, model)


@app.command(cls=RecommendCommand)
def recommend(
    ctx: typer.Context,
    out: Out = Path("runs/recommend"),
    junit: Junit = None,
    export: Annotated[Path | None, typer.Option(help="Folder that the recommended model is written to.")] = None,
    updates: Annotated[bool, typer.Option("--updates", help="Search a defense of updates instead.")] = False,
    federation: Annotated[bool, typer.Option("--federation", help="Search the terms of a federation instead.")] = False,
    address: Annotated[str | None, typer.Option(help="Ray cluster, host:port, whose workers measure recipes.")] = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Search pruners, sparsities, defenses and fine-tuning: which smaller model should I ship?

    FILE.yaml is a run file; flags override its fields. --updates and --federation have flags of their own: add --help.
    """
    from secateur.config import schema_of
    from secateur.experiments.recommend import plan, run_recommend
    from secateur.report.recommend import print_recommendation

    settings: SearchFields = ctx.obj
    schema_of(updates, federation)  # refuses both
    if dry_run:
        say(*plan(settings))
        return
    _check_outputs(junit, export)
    result = run_recommend(settings, out, export, address)
    show = partial(print_recommendation, sentences=result.sentences)
    _print(result.rows, json_, show, f"make it: {result.command}\nthe page: {out / 'report.html'}")
    _hold(result.checks, junit)


@run_command()
def reproduce(
    ctx: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. By default runs/NAME-SCALE.")] = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Run a paper's table or figure, and print it next to the paper's numbers.

    NAME is that of the table or figure, such as dgp-table1 (secateur list studies).
    """
    from secateur.studies.study import reproduce as run

    settings: Reproduce = ctx.obj
    folder = out or Path("runs") / f"{settings.study}-{settings.scale}"
    table = run(settings.study, settings.scale, settings.options, set_, folder)
    if json_:
        typer.echo(json.dumps(list(table.rows())))
        return
    typer.echo(table.markdown())
    say(f"the table: {folder / 'table.md'}", f"the page: {folder / 'report.html'}")


@run_command()
def sweep(
    ctx: typer.Context,
    out: Out = Path("runs/sweep"),
    address: Annotated[str | None, typer.Option(help="Ray cluster, host:port. By default this machine.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Largest number of pieces at once.")] = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Spread audits, inversions, federations, studies and seeds over Ray workers.

    FILE.yaml lists them; flags override its fields.
    """
    from secateur.sweep.plan import plan_at
    from secateur.sweep.run import run_sweep

    settings: Sweep = ctx.obj
    if dry_run:
        say(*(piece.label for piece in plan_at(settings, address)))
        return
    result = run_sweep(settings, out, address, workers)
    summary = f"{len(result.rows)} rows of {len(result.entries)} pieces: {out / 'results.jsonl'}"
    _print(result.rows, json_, lambda rows: say(summary), f"the page: {out / 'report.html'}")
    _fail(result.failed + result.passed_limits, Exit.FAULT if result.failed else Exit.LIMIT)


@command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(metavar=f"{'|'.join(KINDS)}|NAME")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print objects, with defaults, on standard output.")] = False,
) -> None:
    """List the methods of a kind with their papers.

    NAME is a method: its parameters with their defaults, its threat model and its cost are printed.
    """
    from secateur import catalogue

    if not kind:
        raise WrongInput("kind", f"is missing; allowed: {', '.join(KINDS)}")
    if kind not in KINDS:
        _list_method(kind, json_)
        return
    kinds = {"attacks": ("attack", "inversion"), "studies": ("study",)}.get(kind, (kind.removesuffix("s"),))
    descriptions = [(name, method.describe()) for name in kinds for method in catalogue.methods(name).values()]
    rows = [{"kind": name} | row if len(kinds) > 1 else row for name, row in descriptions]
    if json_:
        typer.echo(json.dumps(rows, default=str))
        return
    from secateur.report.terminal import print_methods

    print_methods(rows)


@command()
def init(
    model: Annotated[
        str | None, typer.Option(help="A name (secateur list models), module:function, or a file.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights of a trained model.")] = None,
    data: Annotated[str | None, typer.Option(help="A name (secateur list datasets), a file or a folder.")] = None,
    inputs_are: Annotated[str | None, typer.Option(help="How inputs are scaled: pixels or normalised.")] = None,
    mean: Annotated[str | None, typer.Option(help="Mean of each channel or column, comma-separated.")] = None,
    std: Annotated[str | None, typer.Option(help="Deviation of each channel or column, comma-separated.")] = None,
    train_size: Annotated[int | None, typer.Option(help="Number of members, which are the first rows.")] = None,
    out: Annotated[Path, typer.Option(help="The run file.")] = Path("audit.yaml"),
) -> None:
    """Look at a model and its data, try one batch, and write a commented run file; asks for what is not a flag."""
    from secateur.config import Audit, list_code, read
    from secateur.experiments.starter import run_init

    if out.exists():
        raise WrongInput("out", f"{out} is there already; name another file")
    said = {"inputs_are": inputs_are, "mean": mean, "std": std, "train_size": train_size}
    asks = model is None and data is None
    fields: dict[str, Any] = {"model": model or _ask("model")}
    answer = _ask("weights") if weights is None and asks else weights
    fields |= {"weights": str(answer)} if answer else {}
    fields["data"] = data or _ask("data")
    fields |= {name: value for name, value in said.items() if value is not None}
    while True:
        try:
            sentences = run_init(fields, out)
            break
        except WrongInput as error:  # in a terminal an answer can be mended
            if not asks or error.field not in QUESTIONS or not sys.stdin.isatty():
                raise
            say(f"secateur: {error}", err=True)
            answer = _ask(error.field)
            fields = {name: value for name, value in fields.items() if name != error.field}
            fields |= {error.field: answer} if answer else {}
    trust = " --trust" if list_code(read(Audit, None, fields)) else ""  # the user has named the code just now
    say(*sentences, f"the run file: {out}", f"run it: secateur audit {out}{trust}")


QUESTIONS = {
    "model": "Model (a name, module:function or a file)",
    "weights": "Weights of the trained model (empty: the audit trains it, or the model has its own)",
    "data": "Data (a name, a file or a folder)",
    "inputs_are": "Inputs of the model (pixels: from 0 to 1; normalised: as the data store them)",
    "train_size": "Number of members, which are the first rows of the data",
}


def _ask(field: str) -> str:
    """Ask a question in a terminal; elsewhere refuse the missing field. Weights may be left empty."""
    if not sys.stdin.isatty():
        raise WrongInput(field, f"is missing; use --{field}, or run init in a terminal, where it asks")
    default = "" if field == "weights" else None
    return str(typer.prompt(QUESTIONS[field], default=default, show_default=False)).strip()


def _list_method(name: str, as_json: bool) -> None:
    """Print the methods of a name, of whatever kind."""
    from secateur import catalogue
    from secateur.report.method_sheet import describe_method, print_sheet

    same = [known[name] for kind in catalogue.PACKAGES if name in (known := catalogue.methods(kind))]
    if not same:
        raise unknown("kind", name, KINDS)
    rows = [{"kind": method.kind} | method.describe() | {"text": getdoc(method.make)} for method in same]
    if as_json:
        sheets = [row | describe_method(row) for row in rows]
        typer.echo(json.dumps(sheets, default=str))
        return
    for row in rows:
        print_sheet(row)


@command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the one folder.")] = None,
    formats: Annotated[
        str, typer.Option("--format", help="Evidence pack of an audit: html, pdf, md, json, model-card.")
    ] = "",
    policy: Annotated[Path | None, typer.Option(help="Policy file (YAML) that the evidence is held against.")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Archive the rows of the runs with their provenance: NAME.jsonl.xz.")
    ] = None,
    study: Annotated[str, typer.Option(help="Studies that the archived rows belong to, if the runs were none.")] = "",
    commit: Annotated[str | None, typer.Option(help="Commit of the archived runs; by default this checkout's.")] = None,
) -> None:
    """Write the page of one run, or one page of several; with --format the evidence pack of an audit.

    RUN... are folders of runs, or archives of rows (NAME.jsonl.xz), whose studies' tables are printed too.
    """
    from secateur.runs.archive import is_archive
    from secateur.runs.folder import explain_damage

    if rows is not None:
        _archive(folders, rows, study, commit)
        return
    if formats:
        from secateur.config import PolicyFile, read
        from secateur.report.evidence import write_pack

        rules = None if policy is None else read(PolicyFile, policy, {})
        with explain_damage(folders):
            say(*(file for folder in folders for file in write_pack(folder, formats.split(","), rules)))
        return
    from secateur.report.page import write_page

    with explain_damage(folders):
        page = write_page(folders, out)
        for archive in filter(is_archive, folders):
            _print_tables(archive)
    say(f"the page: {page}" if any(map(is_archive, folders)) else page)


def _archive(folders: Sequence[Path], file: Path, studies: str, commit: str | None) -> None:
    """Write the rows of runs into one archive."""
    from secateur.catalogue import find
    from secateur.runs.archive import SUFFIX, gather_runs, is_archive, write_archive
    from secateur.runs.folder import explain_damage

    if not is_archive(file):
        raise WrongInput("rows", f"{file} is no name of an archive; use NAME{SUFFIX}")
    _check_writable(file)
    names = [name.strip() for name in studies.split(",") if name.strip()]
    for name in names:
        find("study", name)
    with explain_damage(folders):
        archive = gather_runs(folders, names, commit)
        write_archive(file, archive.rows, archive.provenance, archive.figures)
    say(*(f"{name}: {value}" for name, value in archive.provenance.items()), f"{len(archive.rows):,} rows: {file}")


def _print_tables(file: Path) -> None:
    """Print the tables of the studies whose rows an archive holds; of one without studies its provenance."""
    from secateur.runs.archive import read_archive
    from secateur.studies.study import tabulate_archive

    archive = read_archive(file)
    for table in tabulate_archive(archive):
        say(*table.markdown().split("\n"))
    if not archive.studies:
        say(*(f"{name}: {value}" for name, value in archive.provenance.items() if value))


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code (exits.Exit)."""
    # Two threads on a busy two-core machine can be 50 times slower; must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return guard(lambda: app(args=arguments, standalone_mode=False))


def _answer(
    rows: Sequence[Row], limits: Limits, out: Path, show: Callable[[Sequence[Row]], None], as_json: bool, junit: Junit
) -> None:
    """Print the rows of attacked updates and the path of their page, and hold them against the limits."""
    _print(rows, as_json, show, f"the page: {out / 'report.html'}")
    _hold(_check_limits(rows, limits), junit)


def _print(rows: Sequence[Row], as_json: bool, show: Callable[[Sequence[Row]], None], last: str) -> None:
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in rows]))
        return
    show(rows)
    say(*last.split("\n"))


def _check_limits(rows: Sequence[Row], bounds: Limits) -> list[Check]:
    """Hold rows against the limits of their run, if there are any."""
    from secateur.evaluation import limits

    return limits.check(rows, limits.policy_of(bounds))


def _hold(checks: Sequence[Check], junit: Path | None) -> None:
    """Say which limits are not shown to hold, and end with the exit code of the answer."""
    from secateur.evaluation import limits
    from secateur.runs.artifacts import write

    if junit is not None:
        write(junit, limits.junit(checks).encode())
    for check in checks:
        if not check.passed:
            say(f"secateur: {check.sentence}", err=True)
    _end(limits.outcome(checks))


def _end(outcome: str) -> None:
    """End with the exit code of an answer to limits."""
    code = {"within": Exit.DONE, "above": Exit.LIMIT, "inconclusive": Exit.INCONCLUSIVE}[outcome]
    if code is not Exit.DONE:
        raise typer.Exit(code)


def _check_writable(file: Path | None) -> None:
    """Refuse an output file that cannot be written, before any work."""
    if file is None:
        return
    if not file.parent.is_dir() or file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise WrongInput("out", f"{file} cannot be written; name a file in a folder that exists and is yours")


def _check_outputs(junit: Path | None, export: Path | None) -> None:
    """Refuse a report or a folder of models that cannot be written, before any work."""
    _check_writable(junit)
    if export is not None:
        export.mkdir(parents=True, exist_ok=True)
        _check_writable(export / "model.safetensors")


def _fail(sentences: Sequence[str], code: Exit) -> None:
    """Print the sentences on standard error and end with the exit code, if there are any."""
    for sentence in sentences:
        say(f"secateur: {sentence}", err=True)
    if sentences:
        raise typer.Exit(code)


def entry() -> Any:
    """The installed command; an interrupted one waits for no thread, as Flower's may wait for a dead actor for ever."""
    code = main()
    if code == Exit.INTERRUPTED:
        atexit._run_exitfuncs()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
