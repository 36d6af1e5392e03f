"""Uploads of a step one after the other: on a CPU, and those that no graph can hold (sending.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from secateur import tree
from secateur.federated.plan import Plan
from secateur.federated.sending import accumulated, aligned, drawn
from secateur.federated.steps import Exchanged
from secateur.federated.tally import Measured, Tally, mean, measure, square
from secateur.interfaces import Mask, Params, Turning


class OneByOne:
    """Every user's state, and what it sends; as little memory as one user needs at a time."""

    def __init__(self, plan: Plan, params: Params, tally: Tally) -> None:
        self.plan, self.params, self.tally = plan, params, tally
        self.states = [tree.clone(plan.upload.init(params)) for _ in range(plan.users)]

    def keep(self, user: int, grads: Params) -> Params:
        """A backward's gradient, in plain strides."""
        return {name: value.contiguous() for name, value in grads.items()}

    def room(self) -> Params:
        """Where all users' gradients go, (users, ...), without one backward each."""
        # zeros: nothing is written for a layer whose output the loss does not depend on
        return {name: value.new_zeros(self.plan.users, *value.shape) for name, value in self.params.items()}

    def filled(self, room: Params) -> list[Params]:
        """What is in the room now, by user."""
        return [{name: value[user] for name, value in room.items()} for user in range(self.plan.users)]

    def __call__(self, grads: list[Params], chosen: Tensor, turning: Callable[[int], Turning]) -> Exchanged:
        """Lines 5 to 9 of Algorithm 2."""
        wholes = [accumulated(self.plan.upload, *each) for each in zip(grads, self.states, strict=True)]
        inside = self._broadcast(wholes, chosen)
        sent: list[Params] = []
        measured: list[Measured] = []
        for user, (own, whole) in enumerate(zip(grads, wholes, strict=True)):
            sent.append(self._send(user, own, inside, turning(user)))
            self.tally.sent(user, sent[user])
            measured.append(measure(own, whole, sent[user]))
        if inside is not None:  # and has the form of a broadcast, as everybody could follow it
            self.tally.broadcast(inside)
        self.tally.step(Measured(*map(torch.stack, zip(*measured, strict=True))), square(mean(grads)))
        return Exchanged(sent, inside, mean(sent))

    def _broadcast(self, wholes: list[Params], chosen: Tensor) -> Mask | None:
        """ADGP: the positions that the chosen user tells everybody, true or not."""
        method = aligned(self.plan.upload)
        if method is None:
            return None
        honest = method.positions(wholes[int(chosen)])
        if self.plan.liar is None:
            return honest
        inside = self.plan.liar(int(chosen), tree.clone(honest))
        same = [name in inside and torch.equal(inside[name], where) for name, where in honest.items()]
        self.tally.sums["lies"] += not all(same)
        return inside

    def _send(self, user: int, grads: Params, inside: Mask | None, turning: Turning) -> Params:
        state, noise = self.states[user], drawn(self.plan.upload, self.params, turning.rng)
        outside = {"noise": noise} if noise else {}
        outside |= {"inside": inside} if inside is not None else {}
        sent, after = self.plan.upload(grads, state, turning, **outside)
        if after is not state:
            torch._foreach_copy_(list(state.values()), [after[name] for name in state])
        return sent
