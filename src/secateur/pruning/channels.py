"""Channel analysis: the channels of a network that can only be removed together, from its traced graph.

Every output channel of a Conv or Linear is an atom, and so is every input channel of the network. A BatchNorm and an
addition give new atoms, so that a channel before and after them is distinct. A depthwise convolution does so too: its
filter and the channel that it reads are one group. A concatenation puts atoms side by side, and all other operations
pass them on. Atoms that can only be removed together are one group.

The constants list the known layers and functions, by their effect on a channel that is zero.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from secateur.errors import WrongInput
from secateur.models.create import example_rows

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Each channel stays separate, and zero stays zero.
PASS_LAYERS = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Hardswish),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
PASS_FUNCTIONS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone"),
    *("relu", "relu_", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "tanh", "hardswish"),
    *(f"{pool}_pool{n}d" for pool in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)),
}
SCALE_FUNCTIONS = {"mul", "truediv", "div"}  # by a number; by a tensor they are not known
# Each channel stays separate, but zero becomes another value.
SHIFT_LAYERS = (nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Softplus)
SHIFT_FUNCTIONS = {"sigmoid", "logsigmoid", "hardsigmoid", "softplus"}
RESHAPE_FUNCTIONS = {"flatten", "view", "reshape", "squeeze"}
REDUCE_FUNCTIONS = {"mean", "sum"}
SUM_FUNCTIONS = {"add", "add_", "iadd"}
CAT_FUNCTIONS = {"cat", "concat", "concatenate"}
Atoms = list[int]  # one for each feature along dimension 1


@dataclass(frozen=True)
class Norm:
    """BatchNorm: the atoms that it reads and gives."""

    name: str
    reads: Tensor
    gives: Tensor


@dataclass(frozen=True)
class Depthwise:
    """Depthwise convolution: the atoms that it reads, and those that its filters make of them, one by one."""

    name: str
    reads: Tensor
    gives: Tensor


@dataclass(frozen=True)
class Sum:
    """Addition of two values: zero only where both are."""

    left: Tensor
    right: Tensor
    gives: Tensor


@dataclass(frozen=True)
class Channels:
    """Channels of a network; tensors over atoms are indexed by atom."""

    makes: dict[str, Tensor]  # Conv or Linear -> the atoms that it makes
    reads: dict[str, Tensor]  # Conv or Linear -> the atom of each of its input features
    steps: list[Norm | Depthwise | Sum]  # in the order of the graph
    group: Tensor  # (atoms,) int64: equal for atoms that can only be removed together
    fixed: Tensor  # (atoms,) bool: an input or an output of the network, which stays
    raw: Tensor  # (atoms,) bool: read by something other than a BatchNorm
    shifts: list[tuple[str, Tensor]]  # operations that change a zero channel, and the atoms that they read

    @property
    def norms(self) -> dict[str, Norm]:
        """The BatchNorms by name, in the order of the graph."""
        return {step.name: step for step in self.steps if isinstance(step, Norm)}

    def all_of_group(self, atoms: Tensor) -> Tensor:
        """Return (atoms,) bool: True if `atoms` (atoms,) is True for the whole group of the atom."""
        missing = torch.zeros(len(self.group), dtype=torch.bool)
        missing[self.group[~atoms]] = True
        return ~missing[self.group]

    def spread(self, dead: Tensor) -> Tensor:
        """Return (atoms,) bool: the atoms that are zero if `dead` are.

        A BatchNorm and a depthwise convolution that read one are taken to give zero: their masks follow.
        """
        dead = dead.clone()
        for step in self.steps:
            dead[step.gives] |= dead[step.left] & dead[step.right] if isinstance(step, Sum) else dead[step.reads]
        return dead


def analyse(net: nn.Module, input_shape: tuple[int, ...]) -> Channels:
    """Return the channels of a module that torch.fx can trace; WrongInput names an operation that is not known."""
    graph = trace(copy.deepcopy(net).eval(), input_shape)
    walk = _Walk(graph)
    for node in graph.graph.nodes:
        walk.values[node] = walk.visit(node)
    return walk.channels()


def trace(net: nn.Module, input_shape: tuple[int, ...]) -> fx.GraphModule:
    """Return the graph of a module's forward with the shape of every value; WrongInput if it cannot be traced."""
    rows = torch.zeros_like(example_rows(net, input_shape))  # two: squeeze() keeps the batch
    try:
        graph = fx.GraphModule(net, Tracer().trace(net))
        with torch.no_grad():
            ShapeProp(graph).propagate(rows)
    except Exception as error:  # a user's forward may raise anything on proxies
        message = f"its forward cannot be traced, which whole channels need ({type(error).__name__}: {error})"
        raise WrongInput("model", message) from error
    return graph


class Tracer(fx.Tracer):
    """Tracer that keeps known layers whole, the user's subclasses of them included."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True if a call of this module is one step."""
        known = (*CONVS, *NORMS, nn.Linear)
        return isinstance(m, known) or super().is_leaf_module(m, module_qualified_name)


@dataclass
class _Walk:
    """Walk over a graph, node by node, that gives every value its atoms; `parent` is a union-find of the groups."""

    graph: fx.GraphModule
    values: dict[fx.Node, Atoms | None] = field(default_factory=dict)
    parent: list[int] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    makes: dict[str, Atoms] = field(default_factory=dict)
    reads: dict[str, Atoms] = field(default_factory=dict)
    steps: list[Norm | Depthwise | Sum] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    raw: set[int] = field(default_factory=set)
    shifts: list[tuple[str, Tensor]] = field(default_factory=list)

    def channels(self) -> Channels:
        """Return the channels, after all nodes are visited."""
        group = torch.tensor([self.find(atom) for atom in range(len(self.parent))])
        fixed, raw = torch.zeros(2, len(self.parent), dtype=torch.bool)
        fixed[sorted(self.fixed)] = True
        raw[sorted(self.raw)] = True
        makes, reads = ({name: torch.tensor(v) for name, v in atoms.items()} for atoms in (self.makes, self.reads))
        return Channels(makes, reads, self.steps, group, fixed, raw, self.shifts)

    def visit(self, node: fx.Node) -> Atoms | None:
        """Return the atoms of a node's value; None for the output, an attribute, and a value that is no tensor."""
        sources = [n for n in node.all_input_nodes if "tensor_meta" in n.meta]
        if node.op == "output":
            for atoms in map(self.value, sources):
                self.fixed.update(atoms)
                self.raw.update(atoms)
        if node.op in ("output", "get_attr") or "tensor_meta" not in node.meta:
            return None
        if node.op == "placeholder":
            atoms = self.add_atoms(shape_of(node)[1])
            self.fixed.update(atoms)
            return atoms
        layer = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, (*CONVS, nn.Linear, *NORMS)):
            return self.layer(node, layer, self.value(sources[0]))
        atoms = self.operation(node, layer, [self.value(source) for source in sources])
        if len(atoms) != shape_of(node)[1]:
            raise unknown_operation(name_of(node))
        return atoms

    def value(self, node: fx.Node) -> Atoms:
        atoms = self.values[node]
        if atoms is None:
            raise unknown_operation(name_of(node))
        return atoms

    def layer(self, node: fx.Node, layer: nn.Module, source: Atoms) -> Atoms:
        name = str(node.target)
        if name in self.called:
            raise unknown_operation(name_of(node), "is called more than once")
        self.called.add(name)
        if isinstance(layer, NORMS):
            return self.norm(name, layer, source)
        if isinstance(layer, CONVS) and layer.groups > 1 and not is_depthwise(layer):
            raise unknown_operation(name_of(node), "is a grouped convolution")
        if isinstance(layer, nn.Linear) and len(shape_of(node)) != 2:
            raise unknown_operation(name_of(node), "reads more than rows of features")
        self.reads[name] = source
        self.raw.update(source)
        self.makes[name] = self.add_atoms(shape_of(node)[1])
        if is_depthwise(layer):
            self.follow(source, self.makes[name])
            self.steps.append(Depthwise(name, torch.tensor(source), torch.tensor(self.makes[name])))
        return self.makes[name]

    def norm(self, name: str, layer: nn.Module, source: Atoms) -> Atoms:
        gives = self.add_atoms(len(source))
        self.follow(source, gives)
        self.steps.append(Norm(name, torch.tensor(source), torch.tensor(gives)))
        if layer.weight is None:  # without gamma and beta it subtracts a mean that nothing can mask
            self.shifts.append((f"BatchNorm without gamma and beta ({name})", torch.tensor(source)))
        return gives

    def operation(self, node: fx.Node, layer: nn.Module | None, sources: list[Atoms]) -> Atoms:
        name = "" if layer is not None else function_of(node)
        if isinstance(layer, nn.Flatten) or name in RESHAPE_FUNCTIONS:
            return self.reshape(node, layer, sources[0])
        if name in SUM_FUNCTIONS and adds_tensors(node):
            return self.sum(node, sources[0], sources[-1])  # one source, where a value is added to itself
        if name in CAT_FUNCTIONS and argument(node, 1, "dim", 0) == 1:
            return [atom for source in argument(node, 0, "tensors") for atom in self.value(source)]
        if name in REDUCE_FUNCTIONS and is_spatial(node):
            return sources[0]
        if isinstance(layer, SHIFT_LAYERS) or name in SHIFT_FUNCTIONS:
            self.shifts.append((name_of(node), torch.tensor(sources[0])))
            return sources[0]
        passes = isinstance(layer, PASS_LAYERS) or name in PASS_FUNCTIONS | SCALE_FUNCTIONS
        if passes and len(sources) == 1:
            return sources[0]
        raise unknown_operation(name_of(node))

    def reshape(self, node: fx.Node, layer: nn.Module | None, source: Atoms) -> Atoms:
        before, after = shape_of(node.all_input_nodes[0]), shape_of(node)
        if after[:2] == before[:2]:
            return source
        if len(after) == 2 and after[0] == before[0]:  # channel-major: each channel becomes a run of features
            return [atom for atom in source for _ in range(after[1] // len(source))]
        raise unknown_operation(name_of(node), "mixes channels with other dimensions")

    def sum(self, node: fx.Node, left: Atoms, right: Atoms) -> Atoms:
        if len(left) != len(right):
            raise unknown_operation(name_of(node), "adds values of different numbers of channels")
        gives = self.add_atoms(len(left))
        for one, other, both in zip(left, right, gives, strict=True):
            self.unite(one, both)
            self.unite(other, both)
        self.raw.update(left, right)
        self.steps.append(Sum(torch.tensor(left), torch.tensor(right), torch.tensor(gives)))
        return gives

    def add_atoms(self, count: int) -> Atoms:
        """Return new atoms, each a group by itself."""
        atoms = list(range(len(self.parent), len(self.parent) + count))
        self.parent += atoms
        return atoms

    def find(self, atom: int) -> int:
        while self.parent[atom] != atom:
            self.parent[atom] = atom = self.parent[self.parent[atom]]
        return atom

    def follow(self, source: Atoms, gives: Atoms) -> None:
        """Join every atom with the one that a layer makes of it."""
        for before, after in zip(source, gives, strict=True):
            self.unite(before, after)

    def unite(self, one: int, other: int) -> None:
        self.parent[self.find(other)] = self.find(one)


def is_depthwise(layer: nn.Module) -> bool:
    """Return True if a layer is a convolution with one filter for each input channel."""
    return isinstance(layer, CONVS) and 1 < layer.groups == layer.in_channels == layer.out_channels


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a value that has a batch and a channel dimension."""
    meta = node.meta["tensor_meta"]
    if not isinstance(meta, TensorMetadata) or len(meta.shape) < 2:
        raise unknown_operation(name_of(node))
    return tuple(meta.shape)


def adds_tensors(node: fx.Node) -> bool:
    """Return True if both sides of an addition are tensors with equally many dimensions."""
    sides = (argument(node, 0, "input"), argument(node, 1, "other"))
    if not all(isinstance(side, fx.Node) and "tensor_meta" in side.meta for side in sides):
        return False
    return len({len(shape_of(side)) for side in sides}) == 1


def is_spatial(node: fx.Node) -> bool:
    """Return True if a reduction keeps the batch and the channels."""
    dims = argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    rank = len(shape_of(node.all_input_nodes[0]))
    return bool(dims) and all(dim % rank >= 2 for dim in dims)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, positional or by keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def function_of(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def name_of(node: fx.Node) -> str:
    """Return an operation's name in an error: a layer's name, or a function's with the nearest layer before it."""
    if node.op == "call_module":
        return _layer_name(node)
    if node.op not in ("call_function", "call_method"):
        return function_of(node)
    before = list(node.all_input_nodes)
    for source in before:  # the list grows meanwhile, so that the nearest come first
        if source.op == "call_module":
            return f"{function_of(node)} after {_layer_name(source)}"
        before += [earlier for earlier in source.all_input_nodes if earlier not in before]
    return f"{function_of(node)} before any layer"


def _layer_name(node: fx.Node) -> str:
    """Return the type and the name of the layer that a node calls."""
    graph = node.graph.owning_module
    assert graph is not None
    return f"{type(graph.get_submodule(str(node.target))).__name__} ({node.target})"


def unknown_operation(name: str, why: str = "is not known to the channel analysis") -> WrongInput:
    """Return the error for an operation that the analysis cannot follow."""
    return WrongInput("model", f"{name} {why}; prune with torch-pruning, with l1-unstructured or with mask conv-only")
