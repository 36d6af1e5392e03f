"""The one exception that is the user's to mend: it becomes one sentence and exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class WrongInput(Exception):
    """Something the user gave is wrong: names the field and says what is allowed.

    Example:
        >>> str(WrongInput("sparsity", "1.2 is not allowed; give a number from 0 up to, not including, 1"))
        'sparsity: 1.2 is not allowed; give a number from 0 up to, not including, 1'
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[WrongInput], tuple[str, ...]]:
        return WrongInput, (self.field, self.message)  # so that it comes back whole from another process


class NotFinite(WrongInput):
    """A model's outputs are NaN or infinite; where models are many, as in a federation, one such ends nothing."""

    def __init__(self) -> None:
        super().__init__("model", "returned NaN or infinite outputs; check its weights and the data's scale")

    def __reduce__(self) -> tuple[type[WrongInput], tuple[()]]:
        return NotFinite, ()


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
