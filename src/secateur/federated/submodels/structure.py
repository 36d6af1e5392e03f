"""From channels to cells: which numbers of the server's model a client's sub-model is made of, and back.

A model is one flat vector of all its parameters in their order, and so is a sub-model. A Cut holds, for every number of
the sub-model, its place in the server's vector; no two have the same place. Cutting reads these places, mapping back
writes them. Channels that a shortcut joins are one slot and are chosen together; a flattened channel is a run of
features; the network's inputs and outputs are kept whole.

A network of a client's width: its structure, static BatchNorm and the Scaler (HeteroFL; mapp_fl Section 7).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import WrongInput
from secateur.federated.submodels.rules import HeteroFL, Place, Rule
from secateur.interfaces import Params
from secateur.models.create import check
from secateur.models.mapp import Scaler
from secateur.pruning.channels import NORMS, Channels, analyse
from secateur.pruning.removal import shrink_layer, shrink_norm

REMEMBERED = 256  # cuts, and as many that were asked for
Key = TypeVar("Key")


@dataclass(frozen=True)
class Slot:
    """Channels that are chosen together: the outputs of one layer, or of several that a shortcut joins."""

    name: str  # of its first layer
    size: int
    layer: int  # how many slots come before it
    depth: int  # one more than that of what its first layer reads
    start: int  # of its flags, among those of all slots


class Asked(NamedTuple):
    """Whose sub-model, in which round."""

    client: int
    clients: int
    round: int


@dataclass(frozen=True, eq=False)
class Cut:
    """A sub-model among the server's cells."""

    index: Tensor  # (P_c,) the place of each of its numbers in the server's flat vector, on the network's device
    parts: dict[str, Tensor]  # by parameter: the same inside the server's flattened tensor
    shapes: dict[str, tuple[int, ...]]  # of the sub-model's parameters
    channels: dict[str, Tensor]  # layer or norm -> the outputs that it keeps, in the server's numbers

    def take(self, name: str, whole: Tensor) -> Tensor:
        """The sub-model's part of a tensor that has the shape of the server's parameter `name`."""
        return whole.flatten()[self.parts[name].to(whole.device)].view(self.shapes[name])

    def put(self, name: str, whole: Tensor, part: Tensor) -> Tensor:
        """The whole tensor with this part in its place."""
        flat = whole.flatten().clone()
        flat[self.parts[name].to(whole.device)] = part.flatten()
        return flat.view(whole.shape)

    def inputs(self, name: str, whole: int) -> Tensor:
        """The input features that a Conv or Linear keeps, of as many as the server's has."""
        rows, columns, *kernel = self.shapes[f"{name}.weight"]
        size = math.prod(kernel)
        return self.parts[f"{name}.weight"].view(rows, columns, size)[0, :, 0] // size % whole


class _Layer(NamedTuple):
    makes: np.ndarray  # the flag of each output channel
    reads: np.ndarray  # the flag of each input feature


class Structure:
    """A network's slots, and the cells that belong to them."""

    def __init__(self, net: nn.Module, input_shape: tuple[int, ...]) -> None:
        found = analysed(net, input_shape)
        self.device = next(net.parameters()).device
        self.shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.slots, flags = _slots(found)
        self.outputs = [name for name, atoms in found.makes.items() if bool((flags[found.group[atoms]] < 0).all())]
        places = np.where(flags < 0, sum(slot.size for slot in self.slots), flags)[found.group.numpy()]  # by atom
        self.layers = {
            name: _Layer(places[atoms.numpy()], places[found.reads[name].numpy()])
            for name, atoms in found.makes.items()
        }
        self.norms = {name: places[norm.reads.numpy()] for name, norm in found.norms.items()}
        owned = {f"{name}.{part}" for name in (*self.layers, *self.norms) for part in ("weight", "bias")}
        for name, value in net.named_parameters(remove_duplicate=False):
            if name not in self.shapes:
                raise WrongInput("model", f"cannot be cut to sub-models: {name} is another layer's too")
            if name not in owned:
                raise WrongInput("model", f"cannot be cut to sub-models: {name} belongs to no layer with channels")
            if not value.requires_grad:
                raise WrongInput("model", f"cannot be cut to sub-models: {name} is frozen; let all of it be trained")
        self._cuts: dict[bytes, Cut] = {}  # by channels
        self._asked: dict[tuple[Rule, Asked, float] | None, Cut] = {}  # None: the whole model, the same for all

    def widths(self, rate: float) -> list[int]:
        """How many channels of each slot a client with this share keeps: rounded up, as HeteroFL does."""
        if not 0 < rate <= 1:
            raise WrongInput("client_widths", f"{rate} is not allowed; give shares above 0 and up to 1")
        for slot in self.slots:
            if rate * slot.size < 1 - 1e-9:
                least = f"give at least 1/{min(each.size for each in self.slots)}"
                raise WrongInput(
                    "client_widths", f"{rate:g} of {slot.size} leaves the layer {slot.name} without channels; {least}"
                )
        return [math.ceil(rate * slot.size - 1e-9) for slot in self.slots]

    def check(self, rule: Rule, rates: Sequence[float]) -> None:
        """Refuse what the rule cannot cut."""
        if any(rate < 1 for rate in rates) and not self.slots:
            raise WrongInput("model", "cannot be cut to sub-models: it has no layer between its input and its output")
        for rate in rates:
            self.widths(rate)
        narrowest = min(self.slots, key=lambda slot: slot.size, default=None)
        if narrowest is not None and rule.most_groups > narrowest.size:
            least = f"the {narrowest.size} channels of the layer {narrowest.name}"
            raise WrongInput("groups", f"{rule.most_groups} are more than {least}; give fewer")

    def cut(self, rule: Rule, asked: Asked, rate: float) -> Cut:
        """The sub-model that a rule gives a client in a round."""
        key = None if rate == 1 else (rule, asked, rate)
        if key not in self._asked:
            _remember(self._asked, key, self._chosen(rule, asked, rate))
        return self._asked[key]

    def _chosen(self, rule: Rule, asked: Asked, rate: float) -> Cut:
        keep, count = self.widths(rate), sum(slot.size for slot in self.slots) + 1

        def flags(read: np.ndarray | None = None, layer: int = 0) -> np.ndarray:
            """By flag whether it is kept; of the slots that are read, as if they came so many layers later."""
            found = np.full(count, rate == 1)
            found[-1] = True
            for slot, width in zip(self.slots, keep, strict=True) if rate < 1 else ():
                if read is None or bool(((read >= slot.start) & (read < slot.start + slot.size)).any()):
                    place = Place(*asked, slot.layer + layer, slot.depth, width, slot.size)
                    found[slot.start + rule(place)] = True
            return found

        outputs = flags()
        inputs = dict.fromkeys(self.layers, outputs)
        if rule.independent and rate < 1:  # of a layer's inputs as of the outputs of a layer that comes later
            slots = len(self.slots)
            inputs = {name: flags(layer.reads, slots * (i + 1)) for i, (name, layer) in enumerate(self.layers.items())}
        key = b"".join(each.tobytes() for each in (outputs, *inputs.values()))
        if key not in self._cuts:
            _remember(self._cuts, key, self._made(outputs, inputs))
        return self._cuts[key]

    def _made(self, outputs: np.ndarray, inputs: dict[str, np.ndarray]) -> Cut:
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
        own = {name: torch.from_numpy(parts[name]) for name in self.shapes}
        shapes = {name: shapes.get(name, (len(part),)) for name, part in own.items()}
        index = torch.cat([own[name] + offset for name, offset in offsets.items()]).to(self.device)
        return Cut(index, own, shapes, {name: torch.from_numpy(rows) for name, rows in kept.items()})


def analysed(net: nn.Module, input_shape: tuple[int, ...]) -> Channels:
    """The network's channels, refusing with the layer's name what cannot be followed."""
    try:
        return analyse(net, input_shape)
    except WrongInput as error:
        raise WrongInput("model", f"cannot be cut to sub-models: {error.message.partition(';')[0]}") from error


def _slots(found: Channels) -> tuple[list[Slot], Tensor]:
    """The slots in the order of their first layers, and the flag of every group of channels (-1: always kept)."""
    flags = torch.full((len(found.group),), -2)
    flags[found.group[found.fixed]] = -1
    slots: list[Slot] = []
    by_flag: dict[int, Slot] = {}
    for name, atoms in found.makes.items():
        groups = found.group[atoms]
        own = flags[groups]
        if bool((own == -1).any()):
            flags[groups] = -1  # added to the network's own input or output
        elif bool((own == -2).all()) and len(set(groups.tolist())) == len(groups):
            before = int(flags[found.group[found.reads[name][0]]])
            depth = by_flag[before].depth + 1 if before >= 0 else 0
            slot = Slot(name, len(groups), len(slots), depth, len(by_flag))
            flags[groups] = torch.arange(slot.start, slot.start + slot.size)
            by_flag |= dict.fromkeys(range(slot.start, slot.start + slot.size), slot)
            slots.append(slot)
        elif (
            bool((own < 0).any())
            or len({by_flag[flag] for flag in own.tolist()}) > 1
            or len(set(own.tolist())) < len(own)
        ):
            raise WrongInput("model", f"cannot be cut to sub-models: {name} shares some of its channels with others")
        elif len(own) != by_flag[int(own[0])].size:
            raise WrongInput("model", f"cannot be cut to sub-models: {name} shares its channels with wider layers")
    return slots, flags


def _remember(known: dict[Key, Cut], key: Key, cut: Cut) -> None:
    """Keep a cut; of too many the oldest goes."""
    if len(known) >= REMEMBERED:
        del known[next(iter(known))]
    known[key] = cut


def flat_of(params: Params) -> Tensor:
    """(P,) all numbers in their order: a copy."""
    return torch.cat([value.detach().reshape(-1) for value in params.values()])


def params_of(flat: Tensor, shapes: dict[str, tuple[int, ...]]) -> Params:
    """The parameters that a flat vector holds: views."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    return {n: p.view(s) for (n, s), p in zip(shapes.items(), flat.split_with_sizes(sizes), strict=True)}


def static(net: nn.Module) -> nn.Module:
    """A copy whose BatchNorms take the batch's own statistics, in training and in testing, and keep none."""
    made = copy.deepcopy(net)
    for module in made.modules():
        if isinstance(module, NORMS):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return made


def narrowed(
    net: nn.Module, structure: Structure, rate: float, scaler: bool, input_shape: tuple[int, ...], classes: int
) -> nn.Module:
    """The structure of a client's model that keeps this share of the channels; its weights mean nothing."""
    made = copy.deepcopy(net)
    if rate == 1:
        return made
    cut = structure.cut(HeteroFL(), Asked(0, 1, 1), rate)  # any rule's sub-models have this structure
    for name, layer in structure.layers.items():
        outputs, inputs = (torch.zeros(len(each), dtype=torch.bool) for each in layer)
        outputs[cut.channels[name]] = True
        inputs[cut.inputs(name, len(inputs))] = True
        shrink_layer(made, name, outputs, inputs)
    for name, places in structure.norms.items():
        kept = torch.zeros(len(places), dtype=torch.bool)
        kept[cut.channels[name]] = True
        shrink_norm(made, name, kept)
    _scale(made, rate, scaler, [name for name in structure.layers if name not in structure.outputs])
    check(made, input_shape, classes)
    return made


def _scale(net: nn.Module, rate: float, scaler: bool, layers: list[str]) -> None:
    """Divide what hidden layers give by the share of channels kept (mapp_fl Eq. 9): in the network's own Scalers.

    A network without any gets the same behind its layers.
    """
    own = [module for module in net.modules() if isinstance(module, Scaler)]
    for module in own:
        module.rate = rate if scaler else 1.0
    for name in layers if scaler and not own else ():
        net.get_submodule(name).register_forward_hook(partial(_divided, rate))


def _divided(rate: float, layer: nn.Module, given: Any, made: Tensor) -> Tensor:
    return made / rate
