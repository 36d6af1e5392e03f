"""Sub-models as cells of the server's model: channels to cells and back, and networks of a client's width.

A model is one flat vector of all its parameters in their order, and so is a sub-model. A Cut holds, for every number of
the sub-model, its place in the server's vector; no two have the same place. Cutting reads these places, mapping back
writes them. Channels that a shortcut joins are one slot and are chosen together. A flattened channel is a run of
features. The network's inputs and outputs are kept whole.

A narrow network has static BatchNorm and the Scaler (HeteroFL; mapp_fl Section 7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import WrongInput, check_number
from secateur.federated.submodels.rules import Rule, RuleContext
from secateur.interfaces import Params
from secateur.pruning.channels import Channels, Depthwise, analyse

REMEMBERED = 256  # cuts in each of the two caches of a Structure
Key = TypeVar("Key")


@dataclass(frozen=True)
class Slot:
    """Channels that are chosen together: the outputs of one layer, or of several that a shortcut joins."""

    name: str  # of the first layer
    size: int
    layer: int  # the number of slots before it
    depth: int  # one more than the depth of the slot that the first layer reads
    start: int  # of the slot's flags, among those of all slots


class ClientAndRound(NamedTuple):
    """The client and the round of a sub-model."""

    client: int
    clients: int
    round: int


@dataclass(frozen=True, eq=False)
class SubmodelIndex:
    """The place of a sub-model among the server's cells."""

    index: Tensor  # (P_c,) the place of each of its numbers in the server's flat vector, on the network's device
    parts: dict[str, Tensor]  # by parameter: the same places inside the server's flattened tensor
    shapes: dict[str, tuple[int, ...]]  # of the sub-model's parameters
    channels: dict[str, Tensor]  # layer or norm -> the outputs that it keeps, in the server's numbers

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Return the sub-model's part of a tensor that has the shape of the server's parameter `name`."""
        return whole.flatten()[self.parts[name].to(whole.device)].view(self.shapes[name])

    def put(self, name: str, whole: Tensor, part: Tensor) -> Tensor:
        """Return a copy of the whole tensor with this part at its place."""
        flat = whole.flatten().clone()
        flat[self.parts[name].to(whole.device)] = part.flatten()
        return flat.view(whole.shape)

    def inputs(self, name: str, whole: int) -> Tensor:
        """Return the input features that a Conv or Linear keeps, of the `whole` features at the server."""
        rows, columns, *kernel = self.shapes[f"{name}.weight"]
        size = math.prod(kernel)
        return self.parts[f"{name}.weight"].view(rows, columns, size)[0, :, 0] // size % whole


class _Layer(NamedTuple):
    makes: np.ndarray  # the flag of each output channel
    reads: np.ndarray  # the flag of each input feature


class Structure:
    """The slots of a network, and the cells that belong to them."""

    def __init__(self, net: nn.Module, input_shape: tuple[int, ...]) -> None:
        analysis = analyse_channels(net, input_shape)
        self.device = next(net.parameters()).device
        self.shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.slots, flags = _slots(analysis)
        self.outputs = [
            name for name, atoms in analysis.makes.items() if bool((flags[analysis.group[atoms]] < 0).all())
        ]
        places = np.where(flags < 0, sum(slot.size for slot in self.slots), flags)[analysis.group.numpy()]  # by atom
        self.layers = {
            name: _Layer(places[atoms.numpy()], places[analysis.reads[name].numpy()])
            for name, atoms in analysis.makes.items()
        }
        self.norms = {name: places[norm.reads.numpy()] for name, norm in analysis.norms.items()}
        owned = {f"{name}.{part}" for name in (*self.layers, *self.norms) for part in ("weight", "bias")}
        for name, value in net.named_parameters(remove_duplicate=False):
            if name not in self.shapes:
                raise WrongInput("model", f"cannot be cut to sub-models: {name} is another layer's too")
            if name not in owned:
                raise WrongInput("model", f"cannot be cut to sub-models: {name} belongs to no layer with channels")
            if not value.requires_grad:
                raise WrongInput("model", f"cannot be cut to sub-models: {name} is frozen; let all of it be trained")
        self._cuts: dict[bytes, SubmodelIndex] = {}  # by channels
        self._asked: dict[
            tuple[Rule, ClientAndRound, float] | None, SubmodelIndex
        ] = {}  # None: the whole model, the same for all

    def widths(self, rate: float) -> list[int]:
        """Return the channels of each slot that a client with this share keeps: rounded up, as in HeteroFL."""
        check_number("client_widths", rate, "(0, 1]")
        for slot in self.slots:
            if rate * slot.size < 1 - 1e-9:
                least = f"use at least 1/{min(other.size for other in self.slots)}"
                raise WrongInput(
                    "client_widths", f"{rate:g} of {slot.size} leaves the layer {slot.name} without channels; {least}"
                )
        return [math.ceil(rate * slot.size - 1e-9) for slot in self.slots]

    def check(self, rule: Rule, rates: Sequence[float]) -> None:
        """Refuse a network or widths that the rule cannot cut."""
        if any(rate < 1 for rate in rates) and not self.slots:
            raise WrongInput("model", "cannot be cut to sub-models: it has no layer between its input and its output")
        for rate in rates:
            self.widths(rate)
        narrowest = min(self.slots, key=lambda slot: slot.size, default=None)
        if narrowest is not None and rule.most_groups > narrowest.size:
            least = f"the {narrowest.size} channels of the layer {narrowest.name}"
            raise WrongInput("groups", f"{rule.most_groups} are more than {least}; use fewer")

    def cut(self, rule: Rule, asked: ClientAndRound, rate: float) -> SubmodelIndex:
        """Return the sub-model that a rule gives a client in a round."""
        key = None if rate == 1 else (rule, asked, rate)
        if key not in self._asked:
            _remember(self._asked, key, self._choose(rule, asked, rate))
        return self._asked[key]

    def _choose(self, rule: Rule, asked: ClientAndRound, rate: float) -> SubmodelIndex:
        keep, count = self.widths(rate), sum(slot.size for slot in self.slots) + 1

        def flags(read: np.ndarray | None = None, layer: int = 0) -> np.ndarray:
            """Return True for each kept flag, of the slots in `read`; the rule sees them `layer` layers later."""
            kept = np.full(count, rate == 1)
            kept[-1] = True
            for slot, width in zip(self.slots, keep, strict=True) if rate < 1 else ():
                if read is None or bool(((read >= slot.start) & (read < slot.start + slot.size)).any()):
                    context = RuleContext(*asked, slot.layer + layer, slot.depth, width, slot.size)
                    kept[slot.start + rule(context)] = True
            return kept

        outputs = flags()
        inputs = dict.fromkeys(self.layers, outputs)
        if rule.independent and rate < 1:  # draw a layer's inputs as the outputs of a later layer
            slots = len(self.slots)
            inputs = {name: flags(layer.reads, slots * (i + 1)) for i, (name, layer) in enumerate(self.layers.items())}
        key = b"".join(mask.tobytes() for mask in (outputs, *inputs.values()))
        if key not in self._cuts:
            _remember(self._cuts, key, self._build_index(outputs, inputs))
        return self._cuts[key]

    def _build_index(self, outputs: np.ndarray, inputs: dict[str, np.ndarray]) -> SubmodelIndex:
        parts: dict[str, np.ndarray] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        kept = {name: np.flatnonzero(outputs[layer.makes]) for name, layer in self.layers.items()}
        for name, rows in kept.items():
            shape, columns = self.shapes[f"{name}.weight"], np.flatnonzero(inputs[name][self.layers[name].reads])
            kernel = math.prod(shape[2:])
            starts = (rows[:, None] * shape[1] + columns[None]) * kernel
            parts[f"{name}.weight"] = (starts[..., None] + np.arange(kernel)).reshape(-1)
            shapes[f"{name}.weight"] = (len(rows), len(columns), *shape[2:])
            parts[f"{name}.bias"] = rows
        for name, places in self.norms.items():
            kept[name] = parts[f"{name}.weight"] = parts[f"{name}.bias"] = np.flatnonzero(outputs[places])
        offsets = dict(zip(self.shapes, np.cumsum([0, *self.sizes.values()]).tolist(), strict=False))
        cells = {name: torch.from_numpy(parts[name]) for name in self.shapes}
        shapes = {name: shapes.get(name, (len(part),)) for name, part in cells.items()}
        index = torch.cat([cells[name] + offset for name, offset in offsets.items()]).to(self.device)
        return SubmodelIndex(index, cells, shapes, {name: torch.from_numpy(rows) for name, rows in kept.items()})


def analyse_channels(net: nn.Module, input_shape: tuple[int, ...]) -> Channels:
    """Return the network's channels; refuse, with the layer's name, a network that cannot be followed."""
    try:
        channels = analyse(net, input_shape)
    except WrongInput as error:
        raise WrongInput("model", f"cannot be cut to sub-models: {error.message.partition(';')[0]}") from error
    for step in channels.steps:
        if isinstance(step, Depthwise):
            raise WrongInput("model", f"cannot be cut to sub-models: {step.name} is a depthwise convolution")
    return channels


def _slots(channels: Channels) -> tuple[list[Slot], Tensor]:
    """Return the slots in the order of their first layers, and the flag of each group of channels (-1: always kept)."""
    flags = torch.full((len(channels.group),), -2)
    flags[channels.group[channels.fixed]] = -1
    slots: list[Slot] = []
    by_flag: dict[int, Slot] = {}
    for name, atoms in channels.makes.items():
        groups = channels.group[atoms]
        known = flags[groups]
        if bool((known == -1).any()):
            flags[groups] = -1  # added to the network's own input or output
        elif bool((known == -2).all()) and len(set(groups.tolist())) == len(groups):
            before = int(flags[channels.group[channels.reads[name][0]]])
            depth = by_flag[before].depth + 1 if before >= 0 else 0
            slot = Slot(name, len(groups), len(slots), depth, len(by_flag))
            flags[groups] = torch.arange(slot.start, slot.start + slot.size)
            by_flag |= dict.fromkeys(range(slot.start, slot.start + slot.size), slot)
            slots.append(slot)
        elif (
            bool((known < 0).any())
            or len({by_flag[flag] for flag in known.tolist()}) > 1
            or len(set(known.tolist())) < len(known)
        ):
            raise WrongInput("model", f"cannot be cut to sub-models: {name} shares some of its channels with others")
        elif len(known) != by_flag[int(known[0])].size:
            raise WrongInput("model", f"cannot be cut to sub-models: {name} shares its channels with wider layers")
    return slots, flags


def _remember(known: dict[Key, SubmodelIndex], key: Key, cut: SubmodelIndex) -> None:
    """Keep a cut; drop the oldest when there are too many."""
    if len(known) >= REMEMBERED:
        del known[next(iter(known))]
    known[key] = cut


def flat_of(params: Params) -> Tensor:
    """Return (P,) all numbers in their order, as a copy."""
    return torch.cat([value.detach().reshape(-1) for value in params.values()])


def params_of(flat: Tensor, shapes: dict[str, tuple[int, ...]]) -> Params:
    """Return the parameters in a flat vector, as views."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    return {n: p.view(s) for (n, s), p in zip(shapes.items(), flat.split_with_sizes(sizes), strict=True)}
