"""One round of collaborative SGD over the tensors of all users and of the server (dgp Algorithm 2, lines 3 to 10)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Generator, Tensor, nn

from secateur.federated.flat import Flat
from secateur.federated.graphs import Branches, Captured
from secateur.federated.one_batch import OneBatch
from secateur.federated.one_by_one import OneByOne
from secateur.federated.plan import Plan
from secateur.federated.sending import capturable, makes_anew
from secateur.federated.stacked import Stacked
from secateur.federated.statistics import Statistics
from secateur.federated.steps import Exchanged, Found, Round
from secateur.federated.tally import Tally
from secateur.functional import Functional, split
from secateur.interfaces import Params, Turning
from secateur.prediction import arranged
from secateur.timing import cudnn_chooses


class Rounds:
    """The server's model and momentum, every user's state, and the round that changes them.

    All tensors outside of a backward are in plain strides, and stay where they are: a captured round reads and writes
    them in place. For the backwards the filters are copied into channels_last once a round. `stacked` says whether the
    uploads are one operation on all users; None: on a GPU, where a graph can hold them. A CPU has not the memory.
    `at_once` says whether the gradients of all users are one backward, where that is right; None: on a GPU.
    """

    def __init__(
        self,
        net: nn.Module,
        plan: Plan,
        state: Params,
        device: torch.device,
        stacked: bool | None = None,
        at_once: bool | None = None,
    ) -> None:
        self.net, self.plan = net, plan
        self.params, buffers = (_plain(part, device) for part in split(net, state))
        self.moments = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self.number = 0  # rounds so far
        self.rng = Generator()  # of the uploads' noise
        anew, graphs = makes_anew(plan.upload), device.type == "cuda"
        self.learner = Functional(net, training=not anew, device=device)
        self.batchnorm: Literal["eval", "batch"] = "eval" if anew else "batch"
        self.statistics = Statistics(self.learner.structure, buffers, plan.users)
        self.buffers = self.statistics.buffers
        flat = Flat(self.params)
        self.tally = Tally(flat, plan.users)
        one_type = len({value.dtype for value in self.params.values()}) == 1
        if stacked is None:
            stacked = graphs and one_type and capturable(plan.upload) and plan.liar is None
        self.uploads: OneByOne | Stacked = (
            Stacked(plan, self.params, self.tally, flat) if stacked else OneByOne(plan, self.params, self.tally)
        )
        at_once = graphs if at_once is None else at_once
        self.one_batch = OneBatch(self.learner, plan.loss, plan.users, device) if at_once else None
        self.branches = Branches(plan.users, device, parallel=graphs)
        self._gradients = Captured(self.gradients, device) if graphs and not stacked else self.gradients
        self._round = Captured(self._plain_round, device) if graphs and stacked else self._plain_round

    @property
    def states(self) -> list[Params]:
        """What each user keeps at home."""
        return self.uploads.states

    def __call__(self, given: Round) -> Exchanged:
        """One step of everybody; what it returns is overwritten by the next one on a GPU."""
        if isinstance(self.uploads, Stacked):
            self.uploads.draw(self.rng)
        exchanged = self._round(given)
        self.number += 1
        return exchanged

    def _plain_round(self, given: Round) -> Exchanged:
        return self.exchange(given, self._gradients(given))

    def gradients(self, given: Round) -> Found:
        """Line 4: every user's gradient at the shared model, which stays as it is."""
        leaves = {name: value.detach().requires_grad_() for name, value in arranged(self.params).items()}
        with cudnn_chooses(by_timing=True):  # in the steps before a capture: no replay comes here
            return self._at_once(given, leaves) or self._by_user(given, leaves)

    def _at_once(self, given: Round, leaves: Params) -> Found | None:
        """By one backward, where that is right."""
        if self.one_batch is None:
            return None
        if not self.one_batch.takes(leaves, self.statistics, given.given, lambda: self._by_user(given, leaves)):
            return None
        buffers, room = self.statistics.copies(), self.uploads.room()
        losses = self.one_batch(leaves, self.statistics.views(buffers), given.given, room)
        return None if losses is None else Found(list(losses), self.uploads.filled(room), buffers)

    def _by_user(self, given: Round, leaves: Params) -> Found:
        """By a backward each."""
        buffers = self.statistics.copies()  # BatchNorm updates them

        def one(user: int) -> tuple[Tensor, Params]:
            (inputs, labels), dropout = given.given[user]
            tensors = leaves | self.statistics.of(user, buffers)
            loss = self.plan.loss(self.learner(tensors, inputs, dropout), labels)
            wanted = list(leaves.values())
            values = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            return loss.detach(), self.uploads.keep(user, dict(zip(leaves, values, strict=True)))

        losses, grads = zip(*self.branches(one), strict=True)
        return Found(list(losses), list(grads), buffers)

    @torch.no_grad()
    def exchange(self, given: Round, found: Found) -> Exchanged:
        """Lines 5 to 10: what is compressed, sent, averaged and learnt."""
        plan, model = self.plan, self.params | self.buffers

        def turning(user: int) -> Turning:
            batch = given.given[user].batch
            return Turning(self.net, model, batch, self.number, self.rng, plan.loss, self.batchnorm)

        self.tally.losses(found.losses, [user.batch.size for user in given.given])
        exchanged = self.uploads(found.grads, given.chosen, turning)
        self._descend(exchanged.average, given.rate)
        self.statistics.take(found.buffers)
        return exchanged

    def _descend(self, average: Params, rate: Tensor) -> None:
        """Line 10, with the momentum and the weight decay of torch.optim.SGD."""
        weights, moments = ([*part.values()] for part in (self.params, self.moments))
        step = [average[name] for name in self.params]
        torch._foreach_add_(step, weights, alpha=self.plan.weight_decay)
        torch._foreach_mul_(moments, self.plan.momentum)
        torch._foreach_add_(moments, step)
        torch._foreach_sub_(weights, torch._foreach_mul(moments, rate))


def _plain(tensors: Params, device: torch.device) -> Params:
    """Copies on the device in plain strides."""
    return {n: v.detach().to(device).clone(memory_format=torch.contiguous_format) for n, v in tensors.items()}
