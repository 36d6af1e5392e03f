"""The command line: parses, calls, prints; no logic. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.core

from secateur.errors import WrongInput, unknown
from secateur.exits import Exit, Fault, UsageError, guard

if TYPE_CHECKING:
    from secateur.config.base import Fields
    from secateur.config.policy import Limits
    from secateur.runs.rows import Row

C = TypeVar("C", bound="Fields")


class Command(typer.core.TyperCommand):
    """A command whose help is plain text: typer escapes brackets for rich, which does not print it here."""

    def get_help(self, ctx: Any) -> str:
        """The help without the escapes."""
        return super().get_help(ctx).replace("\\[", "[")

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error that is not the user's becomes a fault that knows the run's folder."""
        try:
            return super().invoke(ctx)
        except (WrongInput, UsageError, typer.Abort, typer.Exit):
            raise
        except Exception as error:
            out = ctx.params.get("out")  # as it was typed
            raise Fault(None if out is None else Path(out)) from error


app = typer.Typer(
    name="secateur",
    help="Measure what a compressed neural network gives away about its training data.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command = partial(app.command, cls=Command)
KINDS = ("attacks", "defenses", "pruners", "base-prunings", "submodels", "models", "datasets", "studies")

# What an argument is, its command's docstring says: some versions of typer and click drop the help of arguments.
File = Annotated[Path | None, typer.Argument(metavar="FILE.yaml")]
Config = Annotated[
    Path | None, typer.Option("--config", help="The run file (YAML), as a flag; the others are laid over it.")
]
Out = Annotated[Path, typer.Option(help="The run's folder; started again, it goes on where it was.")]
Model = Annotated[str | None, typer.Option(help="A model of ours (secateur list models) or module:function.")]
Weights = Annotated[Path | None, typer.Option(help="A trained model's weights, .safetensors.")]
Data = Annotated[str | None, typer.Option(help="A data set's name, an .npz, an image folder, or module:function.")]
DataFolder = Annotated[Path | None, typer.Option(help="Where the data set's files are.")]
Many = Annotated[list[str] | None, typer.Option(help="Comma-separated, repeatable.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check what is given, say what would be done, and do nothing.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any field of the file: field.part=value.")]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as one JSON array on standard output.")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Measure what a compressed neural network gives away about its training data."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(installed("secateur-audit"))
        raise typer.Exit


@command()
def audit(
    file: File = None,
    config: Config = None,
    out: Out = Path("runs/audit"),
    model: Model = None,
    weights: Weights = None,
    data: Data = None,
    data_folder: DataFolder = None,
    predictions: Annotated[Path | None, typer.Option(help="Saved predictions (.npz, .csv) instead of a model.")] = None,
    pruner: Many = None,
    sparsity: Many = None,
    defense: Many = None,
    attack: Many = None,
    adaptive: Annotated[bool | None, typer.Option(help="The attacker's shadows use the defense too.")] = None,
    protocol: Annotated[str | None, typer.Option(help="known, unknown-sparsity, unknown or select.")] = None,
    shadows: Annotated[str | None, typer.Option(help="How many shadow models the attacker trains.")] = None,
    in_out: Annotated[str | None, typer.Option(help="How many in-out models, for online LiRA and RMIA.")] = None,
    seeds: Annotated[str | None, typer.Option(help="How many seeds (0, 1, ...).")] = None,
    device: Device = None,
    junit: Annotated[Path | None, typer.Option(help="Write what was held against the limits, for a CI server.")] = None,
    dry_run: DryRun = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Train, prune, fine-tune and attack: what does each way of pruning give away?

    FILE.yaml is a run file; the flags are laid over it.
    """
    options = dict(locals())
    from secateur.config import Audit
    from secateur.experiments.audit import plan, run_audit
    from secateur.experiments.predictions import run_predictions
    from secateur.report.terminal import print_audit

    settings = _settings(Audit, options)
    if dry_run:
        typer.echo("\n".join(plan(settings)))
        return
    _check_writable(junit)
    saved = settings.predictions
    rows = run_audit(settings, out) if saved is None else run_predictions(settings, saved, out)
    _print(rows, json_, print_audit, f"the page: {out / 'report.html'}")
    _hold(rows, settings.limits, junit)


@command()
def invert(
    file: File = None,
    config: Config = None,
    out: Out = Path("runs/invert"),
    model: Model = None,
    weights: Weights = None,
    data: Data = None,
    data_folder: DataFolder = None,
    update: Annotated[Path | None, typer.Option(help="An update captured elsewhere, .safetensors.")] = None,
    defense: Many = None,
    residual: Annotated[Path | None, typer.Option(help="What error feedback kept in a training, .safetensors.")] = None,
    attack: Many = None,
    targets: Annotated[str | None, typer.Option(help="How many updates are attacked.")] = None,
    batch_size: Annotated[str | None, typer.Option(help="Examples in each update.")] = None,
    labels: Annotated[str | None, typer.Option(help="inferred, or oracle: the attacker is told them.")] = None,
    adaptive: Annotated[str | None, typer.Option(help="none, support, layer, reapply or mask.")] = None,
    restarts: Annotated[str | None, typer.Option(help="Trials of each attack; the best by its own loss.")] = None,
    iterations: Annotated[str | None, typer.Option(help="Iterations of each attack.")] = None,
    local_steps: Annotated[str | None, typer.Option(help="The client sends its weights after so many steps.")] = None,
    learning_rate: Annotated[str | None, typer.Option(help="Of the client's local steps.")] = None,
    batchnorm: Annotated[str | None, typer.Option(help="eval or batch: how the client normalises.")] = None,
    images: Annotated[bool | None, typer.Option(help="Show training pictures.")] = None,
    seeds: Annotated[str | None, typer.Option(help="How many seeds (0, 1, ...).")] = None,
    device: Device = None,
    dry_run: DryRun = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Turn a client's update back into pictures: what does one update reveal?

    FILE.yaml is a run file; the flags are laid over it.
    """
    options = dict(locals())
    from secateur.config import Invert
    from secateur.experiments.invert import plan, run_invert
    from secateur.report.terminal import print_inversion

    settings = _settings(Invert, options)
    if dry_run:
        typer.echo("\n".join(plan(settings)))
        return
    _print(run_invert(settings, out), json_, print_inversion, f"the page: {out / 'report.html'}")


@command()
def federate(
    file: File = None,
    config: Config = None,
    out: Out = Path("runs/federate"),
    model: Model = None,
    weights: Weights = None,
    data: Data = None,
    data_folder: DataFolder = None,
    rounds: Annotated[str | None, typer.Option(help="How many rounds.")] = None,
    clients: Annotated[str | None, typer.Option(help="How many clients there are.")] = None,
    per_round: Annotated[str | None, typer.Option(help="How many of them take part in a round.")] = None,
    partition: Annotated[str | None, typer.Option(help="iid, dirichlet-labels or -sizes, writer(-groups).")] = None,
    method: Annotated[str | None, typer.Option(help="fedavg or fedsgd.")] = None,
    local_steps: Annotated[str | None, typer.Option(help="Steps that a client takes in its turn.")] = None,
    local_epochs: Annotated[str | None, typer.Option(help="Or passes over its rows.")] = None,
    batch_size: Annotated[str | None, typer.Option(help="Examples in a step.")] = None,
    learning_rate: Annotated[str | None, typer.Option(help="Of the clients' steps.")] = None,
    averaging: Annotated[str | None, typer.Option(help="coverage (of those who sent), weighted or uniform.")] = None,
    broadcast: Annotated[str | None, typer.Option(help="masked or dense: what the server sends.")] = None,
    base_pruning: Annotated[
        list[str] | None, typer.Option(help="snip, prunefl ... (list base-prunings), comma-separated.")
    ] = None,
    submodels: Annotated[list[str] | None, typer.Option(help="Rules that cut models (list submodels), many.")] = None,
    large_clients: Annotated[str | None, typer.Option(help="Clients that train the whole model.")] = None,
    client_widths: Annotated[str | None, typer.Option(help="The others' shares of channels, such as .5,.25.")] = None,
    uncovered: Annotated[str | None, typer.Option(help="keep or zero: weights that nobody trained.")] = None,
    augment: Annotated[bool | None, typer.Option(help="Sub-models train on crops and flips of pictures.")] = None,
    advise: Annotated[bool | None, typer.Option(help="Pilots: which model size suits each client?")] = None,
    defense: Annotated[
        list[str] | None, typer.Option(help="priprune, dgp ... (list defenses), comma-separated.")
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="sgi, gi-priprune ... (list attacks), comma-separated.")
    ] = None,
    membership: Annotated[str | None, typer.Option(help="yeom, lira: who is in a client's data?")] = None,
    attack_every: Annotated[
        str | None, typer.Option(help="Rounds from one attack to the next; if not given the last alone.")
    ] = None,
    attack_at: Annotated[str | None, typer.Option(help="Or the rounds that are attacked: 5,10,20.")] = None,
    attack_clients: Annotated[
        str | None, typer.Option(help="How many of a round's clients (2, all), or which ([3] or 3,7).")
    ] = None,
    attack_history: Annotated[str | None, typer.Option(help="Rounds of a client that an attack uses together.")] = None,
    fixed_batches: Annotated[bool | None, typer.Option(help="Clients take the same rows in every round.")] = None,
    view: Annotated[str | None, typer.Option(help="update, or sum: what secure aggregation shows.")] = None,
    iterations: Annotated[str | None, typer.Option(help="Iterations of each attack.")] = None,
    labels: Annotated[str | None, typer.Option(help="inferred, or oracle: the attacker is told them.")] = None,
    engine: Annotated[str | None, typer.Option(help="here, or flower: in Flower's simulation.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Seconds that a round of flower waits for answers.")] = None,
    evaluate_every: Annotated[str | None, typer.Option(help="Rounds from one evaluation to the next.")] = None,
    images: Annotated[bool | None, typer.Option(help="Show training pictures.")] = None,
    seeds: Annotated[str | None, typer.Option(help="How many seeds (0, 1, ...).")] = None,
    device: Device = None,
    dry_run: DryRun = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Train a pruned federation, and attack its clients' updates from inside.

    FILE.yaml is a run file; the flags are laid over it.
    """
    options = dict(locals())
    from secateur.config import Federate
    from secateur.experiments.federate import plan, run_federate
    from secateur.report.terminal import print_federation

    settings = _settings(Federate, options)
    if dry_run:
        typer.echo("\n".join(plan(settings)))
        return
    _print(run_federate(settings, out), json_, print_federation, f"the page: {out / 'report.html'}")


@command()
def gate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    policy: Annotated[Path, typer.Option(help="Policy file (YAML): limits, who set them, and until when they hold.")],
    baseline: Annotated[Path | None, typer.Option(help="Run of the last release; worse than it fails.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Write a Markdown summary, for a pull request.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write the checks as SARIF, for a code host.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the checks as JUnit XML, for a CI server.")] = None,
) -> None:
    """Decide from finished runs: do they hold a policy, and are they no worse than the last release?

    RUN is the folder of a finished run. Exit code 0: within the limits, 1: above one, 3: inconclusive.
    """
    from datetime import date

    from secateur.config import PolicyFile, read
    from secateur.evaluation import gate as gates
    from secateur.evaluation import limits
    from secateur.runs.artifacts import version, write
    from secateur.runs.folder import load_finished

    for file in (summary, sarif, junit):
        _check_writable(file)
    rules = read(PolicyFile, policy, {})
    rows = {str(run): load_finished(run) for run in runs}
    before = None if baseline is None else load_finished(baseline)
    decision = gates.decide(rows, rules, before, date.today())
    checks = [check for checked in decision.checks.values() for check in checked]
    contents = {summary: gates.markdown(decision), sarif: gates.sarif(decision, version()), junit: limits.junit(checks)}
    for file, text in contents.items():
        if file is not None:
            write(file, text.encode())
    typer.echo(gates.markdown(decision), nl=False)
    _end(decision.outcome)


@command()
def prune(
    file: File = None,
    config: Config = None,
    out: Annotated[Path, typer.Option(help="Where the pruned model goes.")] = Path("model.safetensors"),
    model: Model = None,
    weights: Weights = None,
    data: Data = None,
    data_folder: DataFolder = None,
    pruner: Annotated[str | None, typer.Option(help="One pruner (secateur list pruners).")] = None,
    sparsity: Annotated[str | None, typer.Option(help="The share to remove, from 0 up to, not including, 1.")] = None,
    defense: Annotated[str | None, typer.Option(help="One defense (secateur list defenses).")] = None,
    remove: Annotated[bool | None, typer.Option(help="Take dead channels out for real.")] = None,
    seed: Annotated[str | None, typer.Option(help="The seed of every draw.")] = None,
    device: Device = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Make a pruned, fine-tuned model: .safetensors with the recipe that made it.

    FILE.yaml is a run file; the flags are laid over it.
    """
    options = dict(locals())
    from secateur.config import Prune
    from secateur.experiments.prune import run_prune
    from secateur.report.terminal import print_measures

    rows = run_prune(_settings(Prune, options), out)
    _print(rows, json_, print_measures, f"the model: {out}")


@command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    scale: Annotated[str, typer.Option(help="tiny, small, or full: the paper's setting.")] = "small",
    data: Data = None,
    data_folder: DataFolder = None,
    model: Model = None,
    seeds: Annotated[str | None, typer.Option(help="How many seeds (0, 1, ...).")] = None,
    device: Device = None,
    images: Annotated[bool | None, typer.Option(help="Show training pictures.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default runs/NAME-SCALE.")] = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Run a paper's table or figure, and print it next to what the paper says.

    NAME is that of the table or figure, such as dgp-table1 (secateur list studies).
    """
    from secateur.studies.study import reproduce as run

    options: dict[str, Any] = {"data": data, "data_folder": data_folder, "model": model, "seeds": seeds}
    options |= {"device": device, "images": images}
    folder = out or Path("runs") / f"{name}-{scale}"
    table = run(name, scale, options, set_, folder)
    if json_:
        typer.echo(json.dumps(list(table.rows())))
        return
    typer.echo(table.markdown())
    typer.echo(f"the table: {folder / 'table.md'}\nthe page: {folder / 'report.html'}")


@command()
def sweep(
    file: File = None,
    config: Config = None,
    out: Out = Path("runs/sweep"),
    address: Annotated[str | None, typer.Option(help="A Ray cluster, host:port; by default this machine.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="At most so many pieces at once.")] = None,
    dry_run: DryRun = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Spread audits, inversions, federations, studies and seeds over Ray workers.

    FILE.yaml says which; the flags are laid over it.
    """
    options = dict(locals())
    from secateur.config import Sweep
    from secateur.sweep.plan import plan_at
    from secateur.sweep.run import run_sweep

    settings = _settings(Sweep, options)
    if dry_run:
        typer.echo("\n".join(piece.told for piece in plan_at(settings, address)))
        return
    swept = run_sweep(settings, out, address, workers)
    summary = f"{len(swept.rows)} rows of {len(swept.entries)} pieces: {out / 'results.jsonl'}"
    _print(swept.rows, json_, lambda rows: typer.echo(summary), f"the page: {out / 'report.html'}")
    for sentence in swept.wrong:
        typer.echo(f"secateur: {sentence}", err=True)
    if swept.wrong:
        raise typer.Exit(Exit.FAULT if swept.failed else Exit.LIMIT)


@command(name="list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="|".join(KINDS))] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print objects, with defaults, on standard output.")] = False,
) -> None:
    """List the methods of a kind with their papers."""
    from secateur import catalogue

    if not kind:
        raise WrongInput("kind", f"is missing; allowed: {', '.join(KINDS)}")
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    kinds = {"attacks": ("attack", "inversion"), "studies": ("study",)}.get(kind, (kind.removesuffix("s"),))
    descriptions = [(name, method.describe()) for name in kinds for method in catalogue.methods(name).values()]
    rows = [{"kind": name} | row if len(kinds) > 1 else row for name, row in descriptions]
    if json_:
        typer.echo(json.dumps(rows, default=str))
        return
    from secateur.report.terminal import print_methods

    print_methods(rows)


@command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...")],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the one folder.")] = None,
) -> None:
    """Write the page of one run, or one page of several.

    DIR... are the folders of the runs.
    """
    from secateur.report.page import write_page

    typer.echo(write_page(folders, out))


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code (exits.Exit)."""
    # Two threads on a busy two-core machine can be 50 times slower; must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return guard(lambda: app(args=arguments, standalone_mode=False))


def _print(rows: Sequence[Row], as_json: bool, show: Callable[[Sequence[Row]], None], last: str) -> None:
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in rows]))
        return
    show(rows)
    typer.echo(last)


def _hold(rows: Sequence[Row], bounds: Limits, junit: Path | None) -> None:
    """Hold rows against the limits of their run, if there are any; end with the exit code of the answer."""
    from secateur.evaluation import limits
    from secateur.runs.artifacts import write

    checks = limits.check(rows, limits.policy_of(bounds))
    if junit is not None:
        write(junit, limits.junit(checks).encode())
    for check in checks:
        if not check.passed:
            typer.echo(f"secateur: {check.sentence}", err=True)
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


def _settings(kind: type[C], options: dict[str, Any]) -> C:
    """The run file with a command's flags laid over it: those that are fields of the file."""
    from secateur.config import read

    if options["file"] is not None and options["config"] is not None:
        raise WrongInput("config", "give the run file once: as the first argument or with --config")
    flags = {name: ",".join(value) if isinstance(value, list) else value for name, value in options.items()}
    fields = {name: value for name, value in flags.items() if name in kind.model_fields}
    return read(kind, options["file"] or options["config"], fields, options["set_"])


def entry() -> Any:
    """The installed command."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
