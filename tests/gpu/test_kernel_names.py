"""Modules of kernels are loaded by their names, so no type checker sees their functions: this test does.

A wrong name would not fail on a GPU either: the loader would fall back to slower operations of torch.
"""

import ast
from pathlib import Path

import pytest

import secateur.gpu

FOLDER = Path(secateur.gpu.__file__).parent
DEFINED = {
    node.name
    for path in FOLDER.glob("*_kernels.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
}


def used_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("kernels", "ctx.kernels"):
            yield node.attr


USERS = [path for path in sorted(FOLDER.glob("*.py")) if "kernels." in path.read_text() and set(used_names(path))]


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.stem)
def test_every_kernel_that_is_used_is_defined(path):
    assert set(used_names(path)) <= DEFINED


def test_the_modules_that_use_kernels_are_found():
    assert {"client_ops", "gradient_products", "priprune_ops", "stacked_layers"} <= {path.stem for path in USERS}
