"""Client training: local SGD of one client or of many stacked.

`train` is pure at its boundary: it clones its start, unless that is `fresh`, and returns new tensors. Outside of the
objective all operations work entry by entry. So the same lines train one client, or many with tensors stacked along a
first axis and an objective under vmap. `ClientTrainer` chooses between the two:

| execution  | training                                                                                          |
|------------|---------------------------------------------------------------------------------------------------|
| sequential | one client after the other, channels_last; the default on a CPU                                   |
| stacked    | all clients in one vmap; on a GPU a CUDA graph that reads the server's tensors where they are     |

Stacked clients need batches of equal sizes. Local steps always have them; local epochs may not, and such a round trains
one client after the other. In float64 both ways are equal to 1e-9 over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.defenses.dp import PrivateTurn
from secateur.errors import WrongInput, check_numbers, check_wholes, unknown
from secateur.functional import Ask, Functional
from secateur.gpu.client_ops import copies, descend, erase
from secateur.gpu.precision import tf32
from secateur.gpu.stacked_layers import Products
from secateur.inference import to_channels_last
from secateur.interfaces import Batch, ClientResult, CustomTurn, Loss, Mask, Optimiser, Params

Objective = Callable[..., Tensor]  # (params, buffers, inputs, labels, *noise) -> the loss, or (clients,) losses
Choose = Callable[[Params, Params], Mask]  # (weights, dense gradient) -> a client's own mask; runs under vmap
Rows = Tensor | Sequence[Tensor]  # of each step: (steps, B), or batches of several sizes
Noise = Sequence[tuple[Tensor, ...]]  # the network's draws for each step
EXECUTIONS = ("auto", "sequential", "stacked")


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return PruneFL's loss: binary cross-entropy with logits on one-hot labels.

    The loss is the mean over examples and classes. Labels may be shares of classes, as in an attacker's search.
    """
    classes = torch.arange(logits.shape[-1], device=labels.device)  # one_hot reads values, which vmap refuses
    shares = labels if labels.is_floating_point() else labels[..., None] == classes
    return binary_cross_entropy_with_logits(logits, shares.to(logits.dtype))


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "binary": binary_cross_entropy}


@dataclass(frozen=True)
class LocalTraining:
    """The local training of a client in its turn; the defaults are those of `secateur federate`."""

    steps: int | None = 5  # batches of a turn; None: epochs instead
    epochs: int | None = None  # passes over the client's rows
    batch_size: int = 20
    learning_rate: float = 0.1
    momentum: float = 0.0  # starts from zero in every turn
    weight_decay: float = 0.0
    loss: Loss = field(default=cross_entropy, repr=False)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise WrongInput("local_steps", "use either local_steps or local_epochs, not both")
        check_wholes(self, "epochs" if self.steps is None else "steps", "batch_size", prefix="local_")
        check_numbers(self, "(0, inf)", "learning_rate")
        check_numbers(self, "[0, 1)", "momentum")
        check_numbers(self, "[0, inf)", "weight_decay")

    @property
    def is_plain(self) -> bool:
        """True if the trained weights are the start minus the learning rate times the sum of the gradients."""
        return self.optimiser.is_plain

    @property
    def optimiser(self) -> Optimiser:
        """The optimiser, as an attacker unrolls it."""
        return Optimiser("sgd", self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True, eq=False)
class BroadcastModel:
    """The model that a round's clients receive: tensors that stay in place, changed in place between rounds."""

    params: Params
    buffers: Params
    mask: Mask


class ClientInputs(NamedTuple):
    """The inputs of a client's turn beside the server's model; tensors of many clients have a first axis of clients."""

    rows: Rows  # of the data
    state: Params  # kept by the client between rounds
    noise: Noise
    chance: Params  # random draws of a turn of its own, of a rule that withholds, of an upload


class TrainedClient(NamedTuple):
    """The result of local training; tensors of many clients have a first axis of clients."""

    params: Params  # exactly 0 where the mask drops
    buffers: Params
    summed: Params  # the dense gradients' sum over the steps; empty without `summing`, or without a step
    last: Params  # the dense gradient of the last batch; empty without a step
    loss: Tensor  # the mean over the steps


class ClientTrainer:
    """The trainer of one client or of many."""

    def __init__(
        self,
        net: nn.Module,
        data: Batch,
        model: BroadcastModel,
        local: LocalTraining,
        custom_turn: CustomTurn | None = None,
        execution: str = "auto",
    ) -> None:
        device = data.inputs.device
        check_network(net, custom_turn, data.inputs)
        self.data, self.model, self.local, self.custom_turn = data, model, local, custom_turn
        self.function = Functional(net, training=True, device=device)
        self.stacks = stacks(execution, device)
        self.summing = False  # True: the dense gradients are added up
        self._asks: dict[int, list[Ask]] = {}

    def arrange_start(self, start: Params | None = None) -> Params:
        """Return the start of one client, or of all, arranged for `train_one`: `start`, else the server's model."""
        params = self.model.params if start is None else start
        return params if self.custom_turn is not None else to_channels_last(params)

    def train_one(
        self, one: ClientInputs, start: Params, choose: Choose | None = None
    ) -> tuple[TrainedClient | ClientResult, Mask | None]:
        """Train one client; return the result and the mask that the client chose, if any."""
        batches = [self._batch(rows) for rows in one.rows]
        with tf32(True):
            return self._train_clients(lambda function, *_: function, one, start, self.model.buffers, batches, choose)

    def train_many(
        self, many: ClientInputs, start: Params, choose: Choose | None
    ) -> tuple[TrainedClient | ClientResult, Mask | None]:
        """Train many stacked clients from the server's model, or from stacked tensors in `start`.

        The tensors in `start` are changed, and must be 0 where the server's mask drops.
        """
        assert isinstance(many.rows, Tensor)
        inputs, labels = self._cast(self.data.inputs[many.rows]), self.data.labels[many.rows]
        batches = [(inputs[:, step], labels[:, step]) for step in range(many.rows.shape[1])]
        count, params, mask, fresh = len(inputs), self.model.params, self.model.mask, self.custom_turn is None
        begun, buffers = (repeat(tensors, count) for tensors in (params, self.model.buffers))
        if fresh:
            begun = {
                name: start[name] if name in start else copies(value, count, mask.get(name))
                for name, value in params.items()
            }
        with tf32(True), Products():
            return self._train_clients(vmap, many, begun, buffers, batches, choose, fresh)

    def noise(self, rows: Rows, rng: Generator) -> Noise:
        """Return the network's random draws for each step: dropout, and noise inside the network."""
        sizes = [rows.shape[-1]] * len(rows) if isinstance(rows, Tensor) else [len(step) for step in rows]
        for size in sizes:
            if size not in self._asks:
                tensors = self.model.params | self.model.buffers
                self._asks[size] = self.function.asks(tensors, self._cast(self.data.inputs[[0] * size]))
        return [tuple(ask.draw(rng) for ask in self._asks[size]) for size in sizes]

    def _train_clients(
        self,
        mapped: Callable[..., Any],  # vmap, or for one client the identity
        turn_inputs: ClientInputs,
        start: Params,
        buffers: Params,
        batches: Sequence[tuple[Tensor, Tensor]],
        choose: Choose | None,
        fresh: bool = False,
    ) -> tuple[TrainedClient | ClientResult, Mask | None]:
        """Train clients; in a round where clients choose their masks they do so before their last step (FedDST).

        A weight that a new mask lets in begins at 0 and takes that step. A turn of its own (PriPrune) has its mask from
        the start, chosen by the gradient of its last batch at the received model.
        """
        model, local, objective = self.model, self.local, mapped(self._objective)
        steps = [
            (*batch, *noise) for batch, noise in zip(batches, turn_inputs.noise or [()] * len(batches), strict=True)
        ]
        if choose is None:
            if self.custom_turn is not None:
                return self._custom_turn(mapped, turn_inputs, batches, None), None
            return train(objective, start, buffers, model.mask, steps, local, self.summing, fresh), None
        first = [] if self.custom_turn is not None else steps[:-1]
        before = train(objective, start, buffers, model.mask, first, local, summing=True, fresh=fresh)
        last = before.last or gradient(objective, before.params, before.buffers, steps[-1])
        mask = mapped(lambda weights, grads: model.mask | choose(weights, grads))(before.params, last)
        if self.custom_turn is not None:
            return self._custom_turn(mapped, turn_inputs, batches, mask), mask
        after = train(objective, before.params, before.buffers, mask, steps[-1:], local, summing=True)
        return add_trainings(before, after, len(first), 1), mask

    def _custom_turn(
        self,
        mapped: Callable[..., Any],
        turn_inputs: ClientInputs,
        batches: Sequence[tuple[Tensor, Tensor]],
        chosen: Mask | None,
    ) -> ClientResult:
        """Run a defense's own turn on all batches."""
        custom_turn, model, rate = self.custom_turn, self.model, self.local.learning_rate
        assert custom_turn is not None

        def turn(state: Params, inputs: Tensor, labels: Tensor, chance: Params, chosen: Mask | None) -> tuple[Any, ...]:
            mask, batches = model.mask if chosen is None else chosen, Batch(inputs, labels)
            return tuple(custom_turn.turn(self._loss, model.params, mask, state, batches, chance, rate))

        axis = batches[0][1].ndim - 1  # the axis of clients comes before the steps
        inputs, labels = (torch.stack(part, axis) for part in zip(*batches, strict=True))
        many = mapped(turn, (0, 0, 0, 0, None if chosen is None else 0))
        return ClientResult(*many(turn_inputs.state, inputs, labels, turn_inputs.chance, chosen))

    def _objective(self, params: Params, buffers: Params, inputs: Tensor, labels: Tensor, *noise: Tensor) -> Tensor:
        return self.local.loss(self.function(params | buffers, inputs, noise), labels)

    def _loss(self, params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        return self._objective(params, self.model.buffers, inputs, labels)

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.to(self.data.inputs.device)
        inputs = self._cast(self.data.inputs[rows])
        return inputs if self.custom_turn is not None else to_channels_last({"": inputs})[""], self.data.labels[rows]

    def _cast(self, inputs: Tensor) -> Tensor:
        return inputs.to(next(iter(self.model.params.values())).dtype)


def train(
    objective: Objective,
    start: Params,
    buffers: Params,
    mask: Mask,
    batches: Sequence[tuple[Tensor, ...]],
    local: LocalTraining,
    summing: bool = False,
    fresh: bool = False,
) -> TrainedClient:
    """Run SGD from `start`, a step for each of `batches` (inputs, labels, noise of the network ...).

    Args:
        objective: the loss of one client, or the (clients,) losses of stacked clients.
        start: the parameters before the first step.
        buffers: BatchNorm's statistics and other buffers before the first step.
        mask: entries that are False are zero from the start on.
        batches: the tensors of each step.
        local: learning rate, momentum and weight decay.
        summing: True to add up the dense gradients.
        fresh: True if no other code needs `start`, which is then changed, and is already zero where the mask drops.
    """
    params = {name: value.requires_grad_() for name, value in (start if fresh else tree.clone(start)).items()}
    held, leaves = tree.clone(buffers), list(params.values())
    dropped = [~mask[name] if name in mask else None for name in params]
    if not fresh:
        _drop(leaves, dropped)
    moments: list[Tensor] = []
    summed: list[Tensor] = []
    losses = []
    grads: list[Tensor] = []
    for batch in batches:
        grads = []  # frees their memory for the next ones
        loss = objective(params, held, *batch)
        # the gradient of the sum holds the gradient of each stacked client
        grads = list(torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True))
        losses.append(loss.detach())
        with torch.no_grad():
            if summing and len(losses) > 2:
                torch._foreach_add_(summed, grads)
            elif summing:  # two gradients may share their memory: these are never changed
                summed = list(torch._foreach_add(summed, grads)) if summed else grads
            moments = _descend(leaves, grads, moments, local, dropped)
    return TrainedClient(
        {name: leaf.detach() for name, leaf in params.items()},
        held,
        dict(zip(params, summed, strict=False)),
        dict(zip(params, grads, strict=False)),
        torch.stack(losses).mean(0) if losses else leaves[0].new_zeros(()),
    )


@torch.no_grad()
def _drop(leaves: Sequence[Tensor], dropped: Sequence[Tensor | None]) -> None:
    """Set dropped entries to zero in place."""
    for leaf, where in zip(leaves, dropped, strict=True):
        if where is not None:
            erase(where, leaf.detach())


def _descend(
    leaves: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    local: LocalTraining,
    dropped: Sequence[Tensor | None],
) -> list[Tensor]:
    """Take one step of torch.optim.SGD, with zero at dropped entries; return the moments."""
    step = grads
    if local.weight_decay:
        step = list(torch._foreach_add(grads, leaves, alpha=local.weight_decay))
    if local.momentum:
        if moments:
            torch._foreach_mul_(moments, local.momentum)
            torch._foreach_add_(moments, step)
        else:
            moments = [value.clone() for value in step]
        step = moments
    descend([leaf.detach() for leaf in leaves], step, local.learning_rate, dropped)
    return moments


def gradient(objective: Objective, params: Params, buffers: Params, batch: tuple[Tensor, ...]) -> Params:
    """Return the dense gradient of one batch, without a step."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    loss = objective(leaves, tree.clone(buffers), *batch)
    grads = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def add_trainings(before: TrainedClient, after: TrainedClient, first: int, then: int) -> TrainedClient:
    """Return a training of `first` steps and one of `then` more steps as one."""
    summed = {name: value + before.summed[name] if before.summed else value for name, value in after.summed.items()}
    return after._replace(summed=summed, loss=(first * before.loss + then * after.loss) / (first + then))


def stacks(execution: str, device: torch.device) -> bool:
    """Return True if clients train stacked in this execution; refuse an unknown one."""
    if execution not in EXECUTIONS:
        raise unknown("execution", execution, EXECUTIONS)
    return execution == "stacked" or (execution == "auto" and device.type == "cuda")


def repeat(tensors: Params, count: int) -> Params:
    """Return views that repeat each tensor along a new first axis."""
    return {name: value.expand(count, *value.shape) for name, value in tensors.items()}


def are_even(rows: Sequence[Rows]) -> bool:
    """Return True if all clients have the same number of batches, all of one size."""
    sizes = {tuple(len(batch) for batch in batches) for batches in rows}
    return len(sizes) == 1 and len(set(next(iter(sizes)))) == 1


def check_network(net: nn.Module, custom_turn: CustomTurn | None, inputs: Tensor) -> None:
    """Refuse a network whose BatchNorm or random draws a turn of its own does not support.

    A dry forward also finds dropout that is called as a function, which no module shows.
    """
    if custom_turn is None:
        return
    name = type(custom_turn.inner if isinstance(custom_turn, PrivateTurn) else custom_turn).__name__
    if any(isinstance(module, _BatchNorm) for module in net.modules()):
        raise WrongInput("defense", f"{name} does not support BatchNorm; use a model without, such as conv-2")
    function = Functional(net, training=True, device=inputs.device)
    params = tree.params_of(function.structure)
    if function.asks(params, inputs[:1].to(next(iter(params.values())).dtype)):
        raise WrongInput("defense", f"{name} does not support random layers; leave dropout and precode out")


def turn_caution(net: nn.Module, custom_turn: CustomTurn | None) -> str | None:
    """Return a note about training this network by turns of their own, if there is one."""
    weights = sum(value.numel() for value in net.parameters() if value.ndim > 1)
    return None if custom_turn is None else custom_turn.caution(weights)
