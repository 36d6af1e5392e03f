"""The user's own training function, and a key of a user's code that changes only with the code that it needs."""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.catalogue import users_own
from secateur.errors import WrongInput
from secateur.interfaces import Batch
from secateur.models.create import misfit
from secateur.training.recipe import Fitted, Task

DYNAMIC = {"eval", "exec", "globals", "vars", "__import__", "importlib", "sys"}  # may reach any name of a module


@dataclass(frozen=True)
class UserFunction:
    """The user's `module:function`, called as `function(model, inputs, labels, generator)` for one model.

    Args of the function:
        model: a new network of the run's structure, with first weights of its own, in training mode.
        inputs: (N, ...) the rows that it is trained on, scaled as those of the audit, on the model's device.
        labels: (N,) int64.
        generator: the chance of this training, on the CPU. Torch's global generator is seeded too.

    It returns the trained network: the model, or another one with equal names and shapes of its tensors.
    """

    reference: str

    def fit_many(self, net: nn.Module, tasks: Sequence[Task], execution: str = "auto") -> Iterator[tuple[int, Fitted]]:
        """Train the model of every task; `execution` is not used, as a user's function trains one model at a time."""
        for index, task in enumerate(tasks):
            state = self.train(net, task)
            yield index, Fitted(tree.to(state, "cpu"), history=[], best_epoch=0, stopped=False)

    def train(self, net: nn.Module, task: Task) -> dict[str, Tensor]:
        """Return the state of one trained model; refuse one that does not fit, is not finite or was not trained."""
        batch, rng = task.train, Generator()
        rng.set_state(task.rng.get_state())
        model = copy.deepcopy(net).to(batch.labels.device).train()
        model.load_state_dict(task.state)
        trained = self._call(model, batch, rng)
        if not isinstance(trained, nn.Module):
            raise WrongInput("train", f"{self.reference} returned {type(trained).__name__}; return the trained model")
        state = tree.state_of(trained)
        if wrong := misfit(task.state, state):
            raise WrongInput("train", f"{self.reference} returned another model than it got; {wrong}")
        if not all(bool(torch.isfinite(value).all()) for value in state.values()):
            raise WrongInput("train", f"{self.reference} returned NaN or infinite weights; check its learning rate")
        names = [name for name, _ in net.named_parameters()]
        if all(torch.equal(state[name].cpu(), task.state[name].cpu()) for name in names):
            raise WrongInput("train", f"{self.reference} returned the weights that it got; it must train them")
        return state

    def _call(self, model: nn.Module, batch: Batch, rng: Generator) -> object:
        function, devices = users_own("train", self.reference), [batch.labels.device] if batch.labels.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(torch.randint(2**31, (), generator=rng)))
            try:
                return function(model, batch.inputs.clone(), batch.labels.clone(), rng)
            except Exception as error:  # the user's code may raise anything
                reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                raise WrongInput("train", f"{self.reference} raised {reason}") from error


def source_key(field: str, reference: str) -> str:
    """Return the sha256 of the code that a user's `module:function` needs, without comments and formatting.

    These are the function, the names of its module that it uses, directly or through others, and statements that bind
    no name. Modules of the same folder that it imports count whole. So does its own where names cannot be followed.
    """
    users_own(field, reference)  # imports the module
    module, _, name = reference.partition(":")
    file = getattr(sys.modules[module], "__file__", None)
    if file is None or not file.endswith(".py"):
        return hashlib.sha256(reference.encode()).hexdigest()
    syntax = ast.parse(Path(file).read_bytes())
    nodes = _select_needed(syntax, name)
    digest = hashlib.sha256(name.encode())
    for node in syntax.body if nodes is None else nodes:
        digest.update(ast.dump(node).encode())
    folder = Path(file).parent
    for path in sorted(
        _find_imported(folder, nodes or syntax.body, sys.modules[module].__package__ or "", {Path(file)})
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _select_needed(syntax: ast.Module, name: str) -> list[ast.stmt] | None:
    """Return the statements of a module that a name needs, in order; None if they cannot be told."""
    bound: dict[str, list[ast.stmt]] = {}
    wanted: list[ast.stmt] = []
    for node in syntax.body:
        names = _bound_names(node)
        if "*" in names:
            return None
        for one in names:
            bound.setdefault(one, []).append(node)
        if not names and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            wanted.append(node)  # it may change whatever the function uses
    wanted += bound.get(name, [])
    done: set[ast.stmt] = set()
    while wanted:
        node = wanted.pop()
        if node in done:
            continue
        done.add(node)
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if used & DYNAMIC:
            return None
        wanted += [other for one in used for other in bound.get(one, [])]
    return [node for node in syntax.body if node in done] if name in bound else None


def _bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds and nothing else; empty for other statements."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names if len(names) == len(targets) else set()


def _find_imported(folder: Path, nodes: Sequence[ast.stmt], package: str, known: set[Path]) -> set[Path]:
    """Return the files below the folder that statements import, directly or through others."""
    files: set[Path] = set()
    names = {name for node in nodes for part in ast.walk(node) for name in _module_names(part)}
    for spec in filter(None, (_spec_of(name, package) for name in names)):
        path = Path(spec.origin or "")
        if path.suffix != ".py" or path in known or not path.is_relative_to(folder) or "site-packages" in path.parts:
            continue
        known.add(path)
        files |= {path} | _find_imported(folder, ast.parse(path.read_bytes()).body, spec.parent or "", known)
    return files


def _module_names(node: ast.AST) -> list[str]:
    """Return the names of modules that an import may load: `from a import b` loads a, and a.b if it is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = "." * node.level + (node.module or "")
    joined = f"{base}." if node.module else base
    return [*([base] if node.module else []), *(joined + alias.name for alias in node.names)]


def _spec_of(name: str, package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name, package or None)
    except (ImportError, ValueError, AttributeError):
        return None
