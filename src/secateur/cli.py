"""The command line: parses, calls, prints; no logic. Heavy imports wait until a command runs.

The options of a command with a run file are the flags of the file's schema (config/base.py `flag`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.core
import typer.main

from secateur.errors import WrongInput, unknown
from secateur.exits import Exit, Fault, UsageError, guard

if TYPE_CHECKING:
    from secateur.config.base import Fields, Flag
    from secateur.runs.rows import Row

C = TypeVar("C", bound="Fields")


class Command(typer.core.TyperCommand):
    """Command whose help is plain text: typer escapes brackets for rich, which does not print it here."""

    def get_help(self, ctx: Any) -> str:
        """Return the help without the escapes."""
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


class SchemaCommand(Command):
    """Command whose options include the flags of a schema: of `config.Audit` for the command audit.

    The schema is imported when the options are needed, so that `secateur --help` stays fast.
    """

    @cached_property
    def flags(self) -> list[Any]:
        """The options that the schema defines."""
        from secateur import config

        return _options(config.flags_of(getattr(config, str(self.name).capitalize())))

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters; those of the schema follow after --out."""
        parameters = super().get_params(ctx)
        after = [parameter.name for parameter in parameters].index("out") + 1
        return [*parameters[:after], *self.flags, *parameters[after:]]

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the function reads the values of the flags in `ctx.obj`."""
        values = {option.name: ctx.params.pop(option.name) for option in self.flags}
        ctx.obj = {
            name: ",".join(value) if isinstance(value, tuple | list) else value
            for name, value in values.items()
            if value not in (None, (), [])
        }
        return super().invoke(ctx)


def _options(flags: Sequence[Flag]) -> list[Any]:
    """Return flags as options, by a function with these parameters: typer has no other interface that lasts.

    Values stay text, because the schema reads them as it reads those of a run file.
    """

    def function(**values: str) -> None:
        """Take the flags."""

    parameters = []
    for flag in flags:
        kind = list[str] if flag.repeat else flag.kind if flag.kind in (bool, Path) else str
        option = typer.Option(help=f"{flag.help} Comma-separated, repeatable." if flag.repeat else flag.help)
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        parameters.append(Parameter(flag.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    holder = typer.Typer(add_completion=False)
    holder.command()(function)
    return list(typer.main.get_command(holder).params)


app = typer.Typer(
    name="secateur",
    help="Measure what a compressed neural network gives away about its training data.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command = partial(app.command, cls=Command)
schema_command = partial(app.command, cls=SchemaCommand)
KINDS = ("attacks", "defenses", "pruners", "base-prunings", "submodels", "models", "datasets", "studies")

# The command's docstring describes its argument: some versions of typer and click drop the help of arguments.
File = Annotated[Path | None, typer.Argument(metavar="FILE.yaml")]
Config = Annotated[Path | None, typer.Option("--config", help="Run file (YAML). Flags override its fields.")]
Out = Annotated[Path, typer.Option(help="Folder of the run. Rerun the same command to resume.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the input and print the plan, but run nothing.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any field of the run file: field.part=value.")]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as one JSON array on standard output.")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Measure what a compressed neural network gives away about its training data."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(installed("secateur-audit"))
        raise typer.Exit


@schema_command()
def audit(
    ctx: typer.Context,
    file: File = None,
    config: Config = None,
    out: Out = Path("runs/audit"),
    junit: Annotated[Path | None, typer.Option(help="JUnit file of the checked limits, for a CI server.")] = None,
    dry_run: DryRun = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Train, prune, fine-tune and attack: how much does each pruned model leak?

    FILE.yaml is a run file; flags override its fields.
    """
    from secateur.config import Audit
    from secateur.evaluation import limits
    from secateur.experiments.audit import plan, run_audit
    from secateur.experiments.predictions import run_predictions
    from secateur.report.terminal import print_audit
    from secateur.runs.artifacts import write

    settings = _settings(Audit, ctx)
    if dry_run:
        typer.echo("\n".join(plan(settings)))
        return
    saved = settings.predictions
    rows = run_audit(settings, out) if saved is None else run_predictions(settings, saved, out)
    _print(rows, json_, print_audit, f"the page: {out / 'report.html'}")
    checks = limits.check(rows, settings.limits.by_measure())
    if junit is not None:
        write(junit, limits.junit(checks).encode())
    _fail([check.sentence for check in checks if not check.passed], Exit.LIMIT)


@schema_command()
def invert(
    ctx: typer.Context,
    file: File = None,
    config: Config = None,
    out: Out = Path("runs/invert"),
    dry_run: DryRun = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Reconstruct training pictures from a client's update: how much does one update leak?

    FILE.yaml is a run file; flags override its fields.
    """
    from secateur.config import Invert
    from secateur.experiments.invert import plan, run_invert
    from secateur.report.terminal import print_inversion

    settings = _settings(Invert, ctx)
    if dry_run:
        typer.echo("\n".join(plan(settings)))
        return
    _print(run_invert(settings, out), json_, print_inversion, f"the page: {out / 'report.html'}")


@schema_command()
def federate(
    ctx: typer.Context,
    file: File = None,
    config: Config = None,
    out: Out = Path("runs/federate"),
    dry_run: DryRun = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Train a pruned federation, and attack its clients' updates from inside.

    FILE.yaml is a run file; flags override its fields.
    """
    from secateur.config import Federate
    from secateur.experiments.federate import plan, run_federate
    from secateur.report.terminal import print_federation

    settings = _settings(Federate, ctx)
    if dry_run:
        typer.echo("\n".join(plan(settings)))
        return
    _print(run_federate(settings, out), json_, print_federation, f"the page: {out / 'report.html'}")


@schema_command()
def prune(
    ctx: typer.Context,
    file: File = None,
    config: Config = None,
    out: Annotated[Path, typer.Option(help="File of the pruned model.")] = Path("model.safetensors"),
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Write a pruned, fine-tuned model: .safetensors with the recipe that made it.

    FILE.yaml is a run file; flags override its fields.
    """
    from secateur.config import Prune
    from secateur.experiments.prune import run_prune
    from secateur.report.terminal import print_measures

    _print(run_prune(_settings(Prune, ctx), out), json_, print_measures, f"the model: {out}")


@schema_command()
def reproduce(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run. By default runs/NAME-SCALE.")] = None,
    images: Annotated[bool | None, typer.Option(help="Show training pictures on the page.")] = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Run a paper's table or figure, and print it next to the paper's numbers.

    NAME is that of the table or figure, such as dgp-table1 (secateur list studies).
    """
    from secateur.studies.study import reproduce as run

    options: dict[str, Any] = ctx.obj | {"images": images}
    scale = options.pop("scale", "small")
    folder = out or Path("runs") / f"{name}-{scale}"
    table = run(name, scale, options, set_, folder)
    if json_:
        typer.echo(json.dumps(list(table.rows())))
        return
    typer.echo(table.markdown())
    typer.echo(f"the table: {folder / 'table.md'}\nthe page: {folder / 'report.html'}")


@command()
def sweep(
    ctx: typer.Context,
    file: File = None,
    config: Config = None,
    out: Out = Path("runs/sweep"),
    address: Annotated[str | None, typer.Option(help="Ray cluster, host:port. By default this machine.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Largest number of pieces at once.")] = None,
    dry_run: DryRun = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Spread audits, inversions, federations, studies and seeds over Ray workers.

    FILE.yaml lists them; flags override its fields.
    """
    from secateur.config import Sweep
    from secateur.sweep.plan import plan_at
    from secateur.sweep.run import run_sweep

    settings = _settings(Sweep, ctx)
    if dry_run:
        typer.echo("\n".join(piece.label for piece in plan_at(settings, address)))
        return
    result = run_sweep(settings, out, address, workers)
    summary = f"{len(result.rows)} rows of {len(result.entries)} pieces: {out / 'results.jsonl'}"
    _print(result.rows, json_, lambda rows: typer.echo(summary), f"the page: {out / 'report.html'}")
    _fail(result.failed + result.passed_limits, Exit.FAULT if result.failed else Exit.LIMIT)


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


def _fail(sentences: Sequence[str], code: Exit) -> None:
    """Print the sentences on standard error and end with the exit code, if there are any."""
    for sentence in sentences:
        typer.echo(f"secateur: {sentence}", err=True)
    if sentences:
        raise typer.Exit(code)


def _settings(kind: type[C], ctx: typer.Context) -> C:
    """Read the run file, whose fields the command's flags override."""
    from secateur.config import read

    file, option = ctx.params["file"], ctx.params["config"]
    if file is not None and option is not None:
        raise WrongInput("config", "is set twice; name the run file as the first argument or with --config")
    path = file or option
    return read(kind, None if path is None else Path(path), ctx.obj or {}, ctx.params["set_"])


def entry() -> Any:
    """The installed command."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
