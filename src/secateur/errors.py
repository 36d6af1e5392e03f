"""The one exception that is the user's to mend: it becomes one sentence and exit code 2."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

LONG_WORD, LONGEST = re.compile(r"\S{500,}"), 4000  # in an error's text


def printable(text: object) -> str:
    r"""Return a text without line breaks, escapes of a terminal and other invisible characters: they are written out.

    Names of files, tensors and columns may come from somebody else, and a terminal obeys what it prints.

    Example:
        >>> printable("a\x1b[31mb"), printable("plain")
        ('a\\x1b[31mb', 'plain')
    """
    plain = str(text)
    return plain if plain.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in plain)


def shorten(text: str) -> str:
    """Return a text for an error: long words lose their middle, and a text of over 4000 characters its end.

    A name, a value or a key of somebody else's file may have thousands of characters.

    Example:
        >>> shorten("a" + 5_000 * "b")[190:220], len(shorten("a b " * 5_000)) <= 4_000
        ('bbbbbbbbbb[4601 more character', True)
    """
    text = LONG_WORD.sub(lambda word: f"{word[0][:200]}[{len(word[0]) - 400} more characters]{word[0][-200:]}", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 40]}[{len(text) - LONGEST + 40} more characters]"


class WrongInput(Exception):
    """Something the user gave is wrong: names the field and says what is allowed.

    Example:
        >>> str(WrongInput("sparsity", "1.2 is not allowed; must be in [0, 1)"))
        'sparsity: 1.2 is not allowed; must be in [0, 1)'
    """

    def __init__(self, field: str, message: str) -> None:
        self.field, self.message = shorten(printable(field)), shorten(printable(message))
        super().__init__(f"{self.field}: {self.message}")

    def __reduce__(self) -> tuple[type[WrongInput], tuple[str, ...]]:
        return WrongInput, (self.field, self.message)  # so that it comes back whole from another process


class NotFinite(WrongInput):
    """A model's outputs are NaN or infinite; where models are many, as in a federation, one such ends nothing."""

    def __init__(self) -> None:
        super().__init__("model", "returned NaN or infinite outputs; check its weights and the data's scale")

    def __reduce__(self) -> tuple[type[WrongInput], tuple[()]]:
        return NotFinite, ()


def expand(path: Path | str) -> Path:
    """Return a path with the home folder for a leading ~; one of an unknown user stays as it is, and does not exist."""
    return Path(os.path.expanduser(path))


def unknown(field: str, name: str, known: Iterable[str]) -> WrongInput:
    """The error for a name that isn't known, with the nearest known one.

    Example:
        >>> str(unknown("pruner", "snp", ["snip", "grasp"]))
        "pruner: 'snp' is not known; did you mean 'snip'? Allowed: grasp, snip"
    """
    names = sorted(known)
    begun = [known_name for known_name in names if name and known_name.startswith(name)]
    near = begun or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? Allowed" if near else "allowed"
    return WrongInput(field, f"{name!r} is not known; {hint}: {', '.join(names)}")


def check_number(field: str, value: float, interval: str) -> None:
    """Check that a number is in an interval, written as in mathematics; NaN is in none.

    Example:
        >>> check_number("sparsity", 0.5, "[0, 1)"), check_number("sigma", 3.0, "[0, inf)")
        (None, None)
        >>> check_number("sparsity", 1.2, "[0, 1)")
        Traceback (most recent call last):
        secateur.errors.WrongInput: sparsity: 1.2 is not allowed; must be in [0, 1)
    """
    low, high = map(float, interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    if not (above and below):
        raise WrongInput(field, f"{value} is not allowed; {describe_interval(interval)}")


def describe_interval(interval: str) -> str:
    """Describe an interval in an error's words.

    Example:
        >>> describe_interval("[0, 1)"), describe_interval("(0, inf)"), describe_interval("[2, inf)")
        ('must be in [0, 1)', 'must be above 0', 'must be at least 2')
    """
    low, high = interval[1:-1].split(", ")
    if math.isfinite(float(high)):
        return f"must be in {interval}"
    return f"must be above {low}" if interval[0] == "(" else f"must be at least {low}"


def check_whole(field: str, value: int, least: int = 1, *, even: bool = False) -> None:
    """Check that a number is whole and large enough, and if asked for even.

    Example:
        >>> check_whole("rounds", 0)
        Traceback (most recent call last):
        secateur.errors.WrongInput: rounds: 0 is not allowed; must be a whole number, at least 1
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least or (even and value % 2):
        raise WrongInput(field, f"{value} is not allowed; {describe_wholes(least, even)}")


def describe_wholes(least: int, even: bool = False, most: int | None = None) -> str:
    """Describe whole numbers from `least` on, up to `most`, in an error's words."""
    end = "" if most is None else f" and at most {most}"
    return f"must be {'an even' if even else 'a whole'} number, at least {least}{end}"


def check_numbers(record: Any, interval: str, *names: str, prefix: str = "") -> None:
    """Check attributes of a record as `check_number` does; `prefix` goes before their names in the error."""
    for name in names:
        check_number(prefix + name, getattr(record, name), interval)


def check_wholes(record: Any, *names: str, least: int = 1, prefix: str = "") -> None:
    """Check attributes of a record as `check_whole` does; `prefix` goes before their names in the error."""
    for name in names:
        check_whole(prefix + name, getattr(record, name), least)


def require(package: str, extra: str) -> None:
    """Say clearly which extra brings an optional package that is missing."""
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise WrongInput(package, f"is not installed; install it with: {install_command(extra)}")


def install_command(extra: str, package: Path = Path(__file__).parent) -> str:
    """Return the command that installs an extra: in a clone from its own files, elsewhere from the index.

    Example:
        >>> install_command("ray", Path("/anywhere/site-packages/secateur"))
        "pip install 'secateur-audit[ray]'"
    """
    cloned = package.parent.name == "src" and (package.parents[1] / "pyproject.toml").is_file()
    return f"pip install -c constraints.txt -e '.[{extra}]'" if cloned else f"pip install 'secateur-audit[{extra}]'"
