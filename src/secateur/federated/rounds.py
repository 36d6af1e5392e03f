"""One round of collaborative SGD over the tensors of all users and of the server (dgp Algorithm 2, lines 3 to 10)."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.federated.graphs import Branches, Captured
from secateur.federated.plan import Plan
from secateur.federated.sending import accumulated, aligned, capturable, makes_anew
from secateur.federated.tally import Measured, Tally, mean, measure
from secateur.functional import Functional, split
from secateur.interfaces import Batch, Mask, Params, Turning
from secateur.prediction import arranged


class Given(NamedTuple):
    """One user's examples of a step, and its chance."""

    batch: Batch
    dropout: tuple[Tensor, ...]
    noise: Params  # of the upload

    def clone(self) -> Self:
        """The same in memory of its own."""
        batch = Batch(self.batch.inputs.clone(), self.batch.labels.clone())
        return type(self)(batch, tuple(value.clone() for value in self.dropout), tree.clone(self.noise))


class Round(NamedTuple):
    """All that a step is given from outside; on a GPU copied to where a graph reads it."""

    given: list[Given]
    rate: Tensor  # () the learning rate
    chosen: Tensor  # (1,) the user that broadcasts

    def tensors(self) -> list[Tensor]:
        """In a fixed order."""
        users = [tensor for user in self.given for tensor in (*user.batch, *user.dropout, *user.noise.values())]
        return [*users, self.rate, self.chosen]

    def clone(self) -> Self:
        """The same in memory of its own."""
        return type(self)([user.clone() for user in self.given], self.rate.clone(), self.chosen.clone())


class Found(NamedTuple):
    """What one user's backward gives."""

    loss: Tensor
    grads: Params
    buffers: Params


class Exchanged(NamedTuple):
    """What went over the wire in one round."""

    sent: list[Params]  # a user each
    inside: Mask | None  # adgp's broadcast


class Rounds:
    """The server's model and momentum, every user's state, and the round that changes them.

    All tensors outside of a backward are in plain strides, and stay where they are: a captured round reads and writes
    them in place. For the backwards the filters are copied into channels_last once a round.
    """

    def __init__(self, net: nn.Module, plan: Plan, state: Params, device: torch.device) -> None:
        self.net, self.plan = net, plan
        self.params, self.buffers = (_plain(part, device) for part in split(net, state))
        self.moments = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self.states = [tree.clone(plan.upload.init(self.params)) for _ in range(plan.users)]
        self.tally = Tally(self.params, plan.users)
        self.number = 0  # rounds so far
        self.rng = Generator()  # of the uploads that draw themselves
        anew = makes_anew(plan.upload)
        self.learner = Functional(net, training=not anew, device=device)
        self.batchnorm: Literal["eval", "batch"] = "eval" if anew else "batch"
        self.averaged, self.taken = _statistics(net)
        graphs = device.type == "cuda"
        whole = graphs and capturable(plan.upload) and plan.liar is None
        self.by_user = Branches(plan.users, device, parallel=graphs)
        self.by_sender = self.by_user if whole else Branches(plan.users, device, parallel=False)
        self.pick = _picked if graphs else _taken
        self._gradients = Captured(self.gradients, device) if graphs and not whole else self.gradients
        self._round = Captured(self._plain_round, device) if whole else self._plain_round

    def __call__(self, given: Round) -> Exchanged:
        """One step of everybody; what it returns is overwritten by the next one on a GPU."""
        exchanged = self._round(given)
        self.number += 1
        return exchanged

    def _plain_round(self, given: Round) -> Exchanged:
        return self.exchange(given, self._gradients(given))

    def gradients(self, given: Round) -> list[Found]:
        """Line 4: every user's gradient at the shared model, which stays as it is."""
        leaves = {name: value.detach().requires_grad_() for name, value in arranged(self.params).items()}

        def one(user: int) -> Found:
            (inputs, labels), dropout, _ = given.given[user]
            buffers = tree.clone(self.buffers)  # BatchNorm updates them
            loss = self.plan.loss(self.learner(leaves | buffers, inputs, dropout), labels)
            wanted = list(leaves.values())
            values = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            grads = {name: value.contiguous() for name, value in zip(leaves, values, strict=True)}
            return Found(loss.detach(), grads, buffers)

        return self.by_user(one)

    @torch.no_grad()
    def exchange(self, given: Round, found: list[Found]) -> Exchanged:
        """Lines 5 to 10: what is compressed, sent, averaged and learnt."""
        grads = [user.grads for user in found]
        wholes = [accumulated(self.plan.upload, *each) for each in zip(grads, self.states, strict=True)]
        inside = self._broadcast(given, wholes)

        def one(user: int) -> tuple[Params, Measured]:
            sent = self._send(user, grads[user], given.given[user], inside)
            self.tally.sent(user, sent)
            return sent, measure(grads[user], wholes[user], sent)

        sent, measured = zip(*self.by_sender(one), strict=True)
        if inside is not None:  # and has the form of a broadcast, as everybody could follow it
            self.tally.broadcast(inside)
        sizes = [user.batch.size for user in given.given]
        self.tally.step([user.loss for user in found], sizes, measured, mean(grads))
        self._descend(mean(sent), given.rate)
        self._statistics([user.buffers for user in found])
        return Exchanged(list(sent), inside)

    def _broadcast(self, given: Round, wholes: list[Params]) -> Mask | None:
        """ADGP: the positions that the chosen user tells everybody, true or not."""
        method = aligned(self.plan.upload)
        if method is None:
            return None
        honest = method.positions(self.pick(wholes, given.chosen))
        if self.plan.liar is None:
            return honest
        inside = self.plan.liar(int(given.chosen), tree.clone(honest))
        same = [name in inside and torch.equal(inside[name], where) for name, where in honest.items()]
        self.tally.values["lies"] += not all(same)
        return inside

    def _send(self, user: int, grads: Params, given: Given, inside: Mask | None) -> Params:
        plan, state = self.plan, self.states[user]
        model = self.params | self.buffers
        turning = Turning(self.net, model, given.batch, self.number, self.rng, plan.loss, self.batchnorm)
        outside = {"noise": given.noise} if given.noise else {}
        outside |= {"inside": inside} if inside is not None else {}
        sent, after = plan.upload(grads, state, turning, **outside)
        if after is not state:
            torch._foreach_copy_(list(state.values()), [after[name] for name in state])
        return sent

    def _descend(self, average: Params, rate: Tensor) -> None:
        """Line 10, with the momentum and the weight decay of torch.optim.SGD."""
        weights, moments, step = ([*part.values()] for part in (self.params, self.moments, average))
        torch._foreach_add_(step, weights, alpha=self.plan.weight_decay)
        torch._foreach_mul_(moments, self.plan.momentum)
        torch._foreach_add_(moments, step)
        torch._foreach_sub_(weights, torch._foreach_mul(moments, rate))

    def _statistics(self, users: list[Params]) -> None:
        """BatchNorm's running statistics become the users' average; of any other buffer the first user's is taken."""
        for name in self.averaged:
            self.buffers[name].copy_(torch.stack([buffers[name] for buffers in users]).mean(0))
        for name in self.taken:
            self.buffers[name].copy_(users[0][name])


def _plain(tensors: Params, device: torch.device) -> Params:
    """Copies on the device in plain strides."""
    return {n: v.detach().to(device).clone(memory_format=torch.contiguous_format) for n, v in tensors.items()}


def _taken(trees: list[Params], which: Tensor) -> Params:
    """One of many."""
    return trees[int(which)]


def _picked(trees: list[Params], which: Tensor) -> Params:
    """The same without asking which: in a graph it is another one at every replay."""
    return {name: torch.stack([tree[name] for tree in trees]).index_select(0, which)[0] for name in trees[0]}


def _statistics(net: nn.Module) -> tuple[list[str], list[str]]:
    """The names of BatchNorm's running statistics, and of all other buffers."""
    norms = [name for name, module in net.named_modules() if isinstance(module, _BatchNorm)]
    running = {f"{name}.{each}".lstrip(".") for name in norms for each in ("running_mean", "running_var")}
    names = [name for name, _ in net.named_buffers()]
    return [name for name in names if name in running], [name for name in names if name not in running]
