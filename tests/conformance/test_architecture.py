"""The map in docs/architecture.md names files and functions that exist, and modules import each other as it says."""

import ast
import functools
import re
from pathlib import Path

import pytest

import secateur

SOURCE = Path(secateur.__file__).parent
MAP = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
FOLLOWED = {"an audit": 10, "an inversion": 14, "a federation": 17}  # and in how many files at most
FLOWER_APP = {"secateur.experiments.federate", "secateur.federated.flower.app"}
FEDERATION = {"attacks.observer", "checkpoint", "federation", "server", "stacked_rounds", "traffic"}
FEDERATION = {f"secateur.federated.{name}" for name in FEDERATION}


def module_of(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def trees():
    """The parsed modules of the package, by their names."""
    return {module_of(path): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


def defined(path):
    """Names that a file defines, methods as Class.method."""
    names = set()
    for node in trees()[module_of(SOURCE / path)].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names |= {node.name, *(f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name"))}
    return names


def test_every_file_and_name_of_the_map_exists():
    for line in MAP.splitlines():
        path = None
        for word in re.findall(r"`([^`]+)`", line):
            if word.endswith(".py"):
                path = word
                assert (SOURCE / path).is_file(), line
            elif re.match(r"\d+\. ", line) and path and re.fullmatch(r"\w+(\.\w+)?", word):
                assert word in defined(path), f"{path} has no {word}: {line}"


def test_every_package_of_the_map_exists_and_none_is_missing():
    rows = [line for line in MAP.splitlines() if line.startswith("|")]
    named = {word.rstrip("/") for row in rows for word in re.findall(r"`([\w.]+/?)`", row.split("|")[2])}
    there = {path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert named == there - {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("what", FOLLOWED)
def test_a_command_is_followed_in_few_files(what):
    section = MAP.split(f"## Follow {what}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py)`", section, re.M)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert 5 < len(steps) <= FOLLOWED[what] and len({path for _, path in steps}) == len(steps)


def test_the_root_stays_small():
    assert len(list(SOURCE.glob("*.py"))) <= 10


def imports(name, node, kind="top"):
    """The modules of the package that a module imports, and whether at import time, in a function or for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # an expression holds no import
        inside = kind
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and kind == "top":
            inside = "function"
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            inside = "types"
        if isinstance(child, ast.Import | ast.ImportFrom):
            base = f"{child.module}." if isinstance(child, ast.ImportFrom) else ""
            for target in (f"{base}{alias.name}" for alias in child.names):
                while target not in trees() and target:
                    target = target.rpartition(".")[0]
                if target and target != name:
                    yield target, kind
        else:
            yield from imports(name, child, inside)


@functools.cache
def edges():
    """The modules that each module imports, and how."""
    return {name: set(imports(name, tree)) for name, tree in trees().items()}


def cycles(*kinds):
    """Sets of modules that import each other, by these kinds of imports."""
    graph = {name: {target for target, kind in targets if kind in kinds} for name, targets in edges().items()}
    reached = {}
    for name in graph:
        seen, todo = set(), [name]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        reached[name] = seen
    knots = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return {knot for knot in knots if len(knot) > 1}


def test_no_modules_import_each_other_but_those_that_the_map_names():
    assert cycles("top") == set()
    assert cycles("top", "function") == {frozenset(FLOWER_APP)}
    assert cycles("top", "types") == {frozenset(FEDERATION)}
    section = MAP.split("## Imports that go in a circle")[1]
    named = {module_of(SOURCE / path) for path in re.findall(r"`([\w/]+\.py)`", section)}
    assert named == FLOWER_APP | FEDERATION
