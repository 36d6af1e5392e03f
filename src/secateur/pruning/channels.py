"""Which channels of a network belong together: found by following its graph.

Every output channel of a Conv or Linear is an atom, and so is every input channel. A BatchNorm and an addition give
new atoms, so that a channel before and after them can be told apart; a concatenation puts atoms side by side, and all
else passes them on. Atoms that can only be removed together are one group.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from secateur.pruning import operations as ops

Atoms = list[int]  # one for each feature along dimension 1


@dataclass(frozen=True)
class Norm:
    """A BatchNorm: what it reads and what it gives."""

    name: str
    reads: Tensor
    gives: Tensor


@dataclass(frozen=True)
class Sum:
    """An addition of two values: zero only where both are."""

    left: Tensor
    right: Tensor
    gives: Tensor


@dataclass(frozen=True)
class Channels:
    """The channels of a network. Tensors over atoms are indexed by atom."""

    makes: dict[str, Tensor]  # Conv or Linear -> the atoms that it makes
    reads: dict[str, Tensor]  # Conv or Linear -> the atom of each of its input features
    steps: list[Norm | Sum]  # in the order of the graph
    group: Tensor  # (atoms,) int64: equal for atoms that can only be removed together
    fixed: Tensor  # (atoms,) bool: an input or an output of the network, which stays
    raw: Tensor  # (atoms,) bool: read by something other than a BatchNorm
    shifts: list[tuple[str, Tensor]]  # operations that turn a zero channel into something else, and what they read

    @property
    def norms(self) -> dict[str, Norm]:
        """The BatchNorms by name, in the order of the graph."""
        return {step.name: step for step in self.steps if isinstance(step, Norm)}

    def everywhere(self, atoms: Tensor) -> Tensor:
        """(groups by atom,) of a bool over atoms: whether it holds for the whole group of each atom."""
        missing = torch.zeros(len(self.group), dtype=torch.bool)
        missing[self.group[~atoms]] = True
        return ~missing[self.group]

    def spread(self, dead: Tensor) -> Tensor:
        """The atoms that are zero when those of `dead` are and every BatchNorm that reads one gives zero there."""
        dead = dead.clone()
        for step in self.steps:
            dead[step.gives] |= dead[step.reads] if isinstance(step, Norm) else dead[step.left] & dead[step.right]
        return dead


def analyse(net: nn.Module, input_shape: tuple[int, ...]) -> Channels:
    """The channels of any module that torch.fx can trace; WrongInput names the operation that it cannot follow."""
    graph = ops.trace(copy.deepcopy(net).eval(), input_shape)
    walk = _Walk(graph)
    for node in graph.graph.nodes:
        walk.values[node] = walk.visit(node)
    return walk.channels()


@dataclass
class _Walk:
    graph: fx.GraphModule
    values: dict[fx.Node, Atoms | None] = field(default_factory=dict)
    parent: list[int] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    makes: dict[str, Atoms] = field(default_factory=dict)
    reads: dict[str, Atoms] = field(default_factory=dict)
    steps: list[Norm | Sum] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    raw: set[int] = field(default_factory=set)
    shifts: list[tuple[str, Tensor]] = field(default_factory=list)

    def channels(self) -> Channels:
        group = torch.tensor([self.find(atom) for atom in range(len(self.parent))])
        fixed, raw = torch.zeros(2, len(self.parent), dtype=torch.bool)
        fixed[sorted(self.fixed)] = True
        raw[sorted(self.raw)] = True
        makes, reads = ({name: torch.tensor(v) for name, v in each.items()} for each in (self.makes, self.reads))
        return Channels(makes, reads, self.steps, group, fixed, raw, self.shifts)

    def visit(self, node: fx.Node) -> Atoms | None:
        """The atoms of a node's value; None where it is no tensor of the network's own."""
        sources = [n for n in node.all_input_nodes if "tensor_meta" in n.meta]
        if node.op == "output":
            for atoms in map(self.value, sources):
                self.fixed.update(atoms)
                self.raw.update(atoms)
        if node.op in ("output", "get_attr") or "tensor_meta" not in node.meta:
            return None
        if node.op == "placeholder":
            atoms = self.new(ops.shape_of(node)[1])
            self.fixed.update(atoms)
            return atoms
        layer = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, (*ops.CONVS, nn.Linear, *ops.NORMS)):
            return self.layer(node, layer, self.value(sources[0]))
        atoms = self.operation(node, layer, [self.value(source) for source in sources])
        if len(atoms) != ops.shape_of(node)[1]:
            raise ops.unknown_operation(ops.name_of(node))
        return atoms

    def value(self, node: fx.Node) -> Atoms:
        atoms = self.values[node]
        if atoms is None:
            raise ops.unknown_operation(ops.name_of(node))
        return atoms

    def layer(self, node: fx.Node, layer: nn.Module, source: Atoms) -> Atoms:
        name = str(node.target)
        if name in self.called:
            raise ops.unknown_operation(ops.name_of(node), "is called more than once")
        self.called.add(name)
        if isinstance(layer, ops.NORMS):
            return self.norm(name, layer, source)
        if isinstance(layer, ops.CONVS) and layer.groups > 1:
            raise ops.unknown_operation(ops.name_of(node), "is a grouped or depthwise convolution")
        if isinstance(layer, nn.Linear) and len(ops.shape_of(node)) != 2:
            raise ops.unknown_operation(ops.name_of(node), "reads more than rows of features")
        self.reads[name] = source
        self.raw.update(source)
        self.makes[name] = self.new(ops.shape_of(node)[1])
        return self.makes[name]

    def norm(self, name: str, layer: nn.Module, source: Atoms) -> Atoms:
        gives = self.new(len(source))
        for before, after in zip(source, gives, strict=True):
            self.unite(before, after)
        self.steps.append(Norm(name, torch.tensor(source), torch.tensor(gives)))
        if layer.weight is None:  # without gamma and beta it subtracts a mean that nothing can mask
            self.shifts.append((f"BatchNorm without gamma and beta ({name})", torch.tensor(source)))
        return gives

    def operation(self, node: fx.Node, layer: nn.Module | None, sources: list[Atoms]) -> Atoms:
        name = "" if layer is not None else ops.function_of(node)
        if isinstance(layer, nn.Flatten) or name in ops.RESHAPE_FUNCTIONS:
            return self.reshape(node, layer, sources[0])
        if name in ops.SUM_FUNCTIONS and ops.adds_tensors(node):
            return self.sum(node, sources[0], sources[-1])  # one source, where a value is added to itself
        if name in ops.CAT_FUNCTIONS and ops.argument(node, 1, "dim", 0) == 1:
            return [atom for source in ops.argument(node, 0, "tensors") for atom in self.value(source)]
        if name in ops.REDUCE_FUNCTIONS and ops.is_spatial(node):
            return sources[0]
        if isinstance(layer, ops.SHIFT_LAYERS) or name in ops.SHIFT_FUNCTIONS:
            self.shifts.append((ops.name_of(node), torch.tensor(sources[0])))
            return sources[0]
        passes = isinstance(layer, ops.PASS_LAYERS) or name in ops.PASS_FUNCTIONS | ops.SCALE_FUNCTIONS
        if passes and len(sources) == 1:
            return sources[0]
        raise ops.unknown_operation(ops.name_of(node))

    def reshape(self, node: fx.Node, layer: nn.Module | None, source: Atoms) -> Atoms:
        before, after = ops.shape_of(node.all_input_nodes[0]), ops.shape_of(node)
        if after[:2] == before[:2]:
            return source
        if len(after) == 2 and after[0] == before[0]:  # channel-major: each channel becomes a run of features
            return [atom for atom in source for _ in range(after[1] // len(source))]
        raise ops.unknown_operation(ops.name_of(node), "mixes channels with other dimensions")

    def sum(self, node: fx.Node, left: Atoms, right: Atoms) -> Atoms:
        if len(left) != len(right):
            raise ops.unknown_operation(ops.name_of(node), "adds values of different numbers of channels")
        gives = self.new(len(left))
        for one, other, both in zip(left, right, gives, strict=True):
            self.unite(one, both)
            self.unite(other, both)
        self.raw.update(left, right)
        self.steps.append(Sum(torch.tensor(left), torch.tensor(right), torch.tensor(gives)))
        return gives

    def new(self, count: int) -> Atoms:
        atoms = list(range(len(self.parent), len(self.parent) + count))
        self.parent += atoms
        return atoms

    def find(self, atom: int) -> int:
        while self.parent[atom] != atom:
            self.parent[atom] = atom = self.parent[self.parent[atom]]
        return atom

    def unite(self, one: int, other: int) -> None:
        self.parent[self.find(other)] = self.find(one)
