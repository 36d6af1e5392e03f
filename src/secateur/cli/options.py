"""Commands with a run file: their options are the flags of the file's schema, and their settings come from both.

The schema of a command is imported when it is needed, so that `secateur --help` stays fast.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from functools import cached_property
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
import typer.main

from secateur.cli.exits import Fault, UsageError
from secateur.errors import WrongInput, printable

if TYPE_CHECKING:
    from secateur.config import Fields

# The command's docstring describes its argument: some versions of typer and click drop the help of arguments.
File = Annotated[Path | None, typer.Argument(metavar="FILE.yaml")]
Config = Annotated[Path | None, typer.Option("--config", help="Run file (YAML). Flags override its fields.")]
Trust = Annotated[bool, typer.Option("--trust", help="Call the module:function that the run file names.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any field of the run file: field.part=value.")]
KINDS = re.compile(r"^recommends: *(updates|federation)\b", re.MULTILINE)
METHODS = {name: name for name in ("attack", "defense", "pruner", "model")} | {"data": "dataset"}  # fields and kinds


class Command(typer.core.TyperCommand):
    """Command whose help is plain text: typer escapes brackets for rich, which does not print it here."""

    def get_help(self, ctx: Any) -> str:
        """Return the help without the escapes."""
        return super().get_help(ctx).replace("\\[", "[")

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error that is not the user's becomes a fault that knows the run's folder."""
        for name, value in ctx.params.items():
            for text in value if isinstance(value, list | tuple) else (value,):
                if isinstance(text, str | Path) and not str(text).isascii():
                    _check_text(name, str(text))
        try:
            return super().invoke(ctx)
        except (WrongInput, UsageError, typer.Abort, typer.Exit):
            raise
        except Exception as error:
            out = ctx.params.get("out")  # as it was typed
            raise Fault(None if out is None else Path(out)) from error


class RunCommand(Command):
    """Command with a run file: `ctx.obj` has its settings, read from the file and from the flags of its schema.

    The schema of audit-app is `config.AuditApp`. It is imported when it is needed: `secateur --help` stays fast.
    """

    @cached_property
    def schema(self) -> type[Fields]:
        """The schema of the command's run file."""
        from secateur import config

        return getattr(config, str(self.name).title().replace("-", ""))  # type: ignore[no-any-return]

    @cached_property
    def inputs(self) -> list[Any]:
        """The parameters that make the settings."""
        bases: dict[str, Callable[..., None]] = {"reproduce": _study, "audit-app": _app}
        return run_parameters(self.schema, bases.get(str(self.name), _run_file))

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the settings and those of the function."""
        return [*self.inputs, *super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the arguments, and remember them as they were typed."""
        ctx.meta["typed"] = [self.name, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command with its settings; the run's folder keeps the command line."""
        from secateur.runs.folder import COMMAND

        COMMAND.set(shlex.join(["secateur", *ctx.meta["typed"]]))
        values = {parameter.name: ctx.params.pop(parameter.name) for parameter in self.inputs}
        trusted = values.pop("trust", False)
        code = read_code(ctx, self.schema, values)
        if code and ctx.params.get("dry_run") and self.name != "sweep":  # the plan of a sweep calls nothing
            say(f"a dry run does not call the code that the run file names, so only the fields were checked: {code}")
            return None
        if code and not trusted and not ctx.params.get("dry_run"):
            advice = "read the file, then add --trust, or name it on the command line"
            raise WrongInput("config", f"the run file names code or an address of a model ({code}); {advice}")
        return super().invoke(ctx)


class RecommendCommand(RunCommand):
    """Command whose schema depends on what is recommended: a model, a defense of updates or a federation.

    A flag says it, or the field `recommends` of the run file, which a run's own file has.
    """

    kind = ""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the arguments by the schema of their kind."""
        kind = next((name for name in ("updates", "federation") if f"--{name}" in args), "")
        files = [Path(text) for text in args if text.endswith((".yaml", ".yml"))]
        if not kind and files and (field := KINDS.search(_read_text(files[0]))):
            kind = field[1]
        if kind != self.kind:
            self.kind = kind
            for name in ("schema", "inputs"):
                self.__dict__.pop(name, None)
        return super().parse_args(ctx, args)

    @cached_property
    def schema(self) -> type[Fields]:
        """The schema of the run file of this kind."""
        from secateur.config import schema_of

        return schema_of(self.kind == "updates", self.kind == "federation")


def _read_text(file: Path) -> str:
    """Return the text of a run file; empty if it cannot be read, which `read` then says."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def read_code(ctx: Any, schema: type[Fields], values: dict[str, Any]) -> str:
    """Read the settings into `ctx.obj`, and return the code that only the run file names, in words; empty if none.

    A run file may come from somebody else, and code that it names would run as the user. What the user typed is the
    user's own.
    """
    from secateur.config import list_code

    file = values.get("file") or values.get("config")
    flags = {name for name, value in values.items() if value not in (None, [], ())} - {"file", "config", "set_"}
    set_values = {text.partition("=")[2] for text in values.get("set_") or ()}
    ctx.obj = settings = read_settings(schema, dict(values))
    if file is None:
        return ""
    configs: Sequence[Fields] = [settings]
    if hasattr(settings, "jobs"):
        from secateur.sweep.plan import plan

        configs = [piece.config for piece in plan(settings)]  # type: ignore[arg-type]
    code = {(field, name) for config in configs for field, name in list_code(config).items()}
    return ", ".join(f"{field} {name}" for field, name in sorted(code) if field not in flags and name not in set_values)


def _check_text(field: str, text: str) -> None:
    """Refuse a name that is not UTF-8: no page and no row could show it, after all the work."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WrongInput(field, f"{text} is not valid UTF-8; use another name") from None


def _run_file(file: File = None, config: Config = None, set_: Set = None, trust: Trust = False) -> None:
    """Take the parameters that every run file has."""


def _study(study: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Take the argument of reproduce."""


def _app(app: Annotated[Path, typer.Argument(metavar="FOLDER")], config: Config = None, set_: Set = None) -> None:
    """Take the parameters of audit-app, whose code is always named on the command line."""


def run_parameters(schema: type[Fields], base: Callable[..., None]) -> list[Any]:
    """Return the parameters of a function, and the flags of a schema as options whose values are text.

    Typer makes them from one function with all of these parameters: its other interfaces change with its versions.
    """
    from secateur.config import flags_of

    parameters = list(signature(base, eval_str=True).parameters.values())
    for flag in flags_of(schema):
        kind = list[str] if flag.many else flag.kind if flag.kind in (bool, Path) else str
        text = f"{flag.help} Comma-separated, repeatable." if flag.repeat else flag.help
        option = typer.Option(help=text, autocompletion=complete_names(schema.__name__, flag.name))
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        parameters.append(Parameter(flag.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation))

    def function(**values: str) -> None:
        """Take all parameters."""

    function.__signature__ = signature(base).replace(parameters=parameters)  # type: ignore[attr-defined]
    holder = typer.Typer(add_completion=False)
    holder.command()(function)
    return list(typer.main.get_command(holder).params)


def complete_names(schema: str, field: str) -> Callable[[str], list[str]] | None:
    """Return the completion of a flag whose values are methods; None for other flags."""
    if field not in METHODS:
        return None
    kind = "inversion" if field == "attack" and schema in ("Invert", "RecommendUpdates") else METHODS[field]

    def complete(incomplete: str) -> list[str]:
        """Return the values whose last name begins as it was typed: names are joined by commas and by +."""
        from secateur.catalogue import methods

        begun = re.split(r"[,+]", incomplete)[-1]
        before = incomplete.removesuffix(begun)
        return [before + name for name in methods(kind) if name.startswith(begun)]

    return complete


def read_settings(schema: type[Fields], values: dict[str, Any]) -> Fields:
    """Read the run file, whose fields the flags override."""
    from secateur.config import flags_of, read

    file, option, overrides = (values.pop(name, None) for name in ("file", "config", "set_"))
    if file is not None and option is not None:
        raise WrongInput("config", "is set twice; name the run file as the first argument or with --config")
    path = file or option
    for flag in flags_of(schema):
        if flag.many and not flag.repeat and len(values.get(flag.name) or ()) > 1:
            raise WrongInput(flag.name, "is set twice; use one comma-separated list")
    flags = {
        name: ",".join(value) if isinstance(value, list | tuple) else value
        for name, value in values.items()
        if value not in (None, [], ())
    }
    return read(schema, None if path is None else Path(path), flags, overrides)


def say(*lines: object, err: bool = False) -> None:
    """Print lines, in which names may come from somebody else: escapes for the terminal are written out."""
    for line in lines:
        typer.echo(printable(line), err=err)
