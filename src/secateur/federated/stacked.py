"""Uploads of a step all at once: the users are one axis after their backwards, for a CUDA graph of few nodes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.func import vmap

from secateur.defenses.error_feedback import INNER, RESIDUAL, ErrorFeedback
from secateur.defenses.noise import GaussianNoise, on_device
from secateur.federated.flat import Flat
from secateur.federated.plan import Plan
from secateur.federated.sending import SendAll, aligned, drawn, inner_of
from secateur.federated.steps import Exchanged
from secateur.federated.tally import Tally, measured, square
from secateur.interfaces import Mask, Params, Turning


class Stacked:
    """Every user's state as views of stacked tensors, and what all of them send.

    The upload is written for one user and mapped over all. Error feedback is taken out of it and done on whole rows:
    the residual's own memory holds gradient + residual while that is compressed, and again the residual when what is
    sent was taken away, entry by entry as error_feedback.py does it.
    """

    def __init__(self, plan: Plan, params: Params, tally: Tally, flat: Flat) -> None:
        self.plan, self.params, self.tally, self.flat = plan, params, tally, flat
        self.inner, self.feedback = inner_of(plan.upload), isinstance(plan.upload, ErrorFeedback)
        self.found = flat.new(plan.users)  # gradients, filters channels last
        self.whole = flat.new(plan.users)  # X, what is compressed; between two steps the residual
        self.kept = {name: _repeated(value, plan.users) for name, value in self.inner.init(params).items()}
        self.noise_rows = flat.new(plan.users) if isinstance(self.inner, GaussianNoise) else None
        self.noise = flat.views(self.noise_rows) if self.noise_rows is not None else self._noise()
        self.states = [self._state(user) for user in range(plan.users)]

    def keep(self, user: int, grads: Params) -> Params:
        """A backward's gradient, as a row of all."""
        self.flat.join_turned(grads, self.found[user])
        return self.flat.turned(self.found[user])

    def draw(self, rng: Generator) -> None:
        """All users' noise of a step, to where a graph reads it; on a GPU in one draw."""
        if self.noise_rows is not None and self.noise_rows.device.type != "cpu":
            self.noise_rows.normal_(generator=on_device(self.noise_rows.device, rng))
        elif self.noise:
            for user in range(self.plan.users):
                for name, value in drawn(self.plan.upload, self.params, rng).items():
                    self.noise[name][user].copy_(value)

    def __call__(self, grads: list[Params], chosen: Tensor, turning: Callable[[int], Turning]) -> Exchanged:
        """Lines 5 to 9 of Algorithm 2."""
        self._accumulate()
        before, average = self._squares(self.whole), self.found.mean(0)
        inside = self._broadcast(chosen)
        sent = self._send(inside, turning(0))
        if self.feedback:
            missing = self._squares(self.whole.sub_(sent))
        else:
            missing = self._squares(self.whole - sent) if sent is not self.whole else torch.zeros_like(before)
        own = torch.linalg.vector_norm(self.found, dim=1).square() if self.feedback else before.sum(1)
        self.tally.sent_by_all(sent)
        self.tally.step(measured(own, before, missing), square({"": average}))
        views = self.flat.views(sent)
        each = [{name: value[user] for name, value in views.items()} for user in range(self.plan.users)]
        return Exchanged(each, inside, self.flat.views(sent.mean(0)))

    def _accumulate(self) -> None:
        """Gradient + residual with error feedback, else the gradient, in plain strides."""
        to, tail = self.flat.views(self.whole), self.flat.tail
        of = self.flat.turned(self.found)
        pairs = [(to[name], of[name]) for name in self.flat.filters] + [(self.whole[:, tail:], self.found[:, tail:])]
        for into, value in pairs:
            into.add_(value) if self.feedback else into.copy_(value)

    def _broadcast(self, chosen: Tensor) -> Mask | None:
        """ADGP: the chosen user's positions, without asking who it is: in a graph it is another at every replay."""
        method = aligned(self.plan.upload)
        if method is None:
            return None
        inside = method.positions(self.flat.views(self.whole.index_select(0, chosen)[0]))
        self.tally.broadcast(inside)
        return inside

    def _send(self, inside: Mask | None, turning: Turning) -> Tensor:
        """(users, N) what everybody sends."""
        if isinstance(self.inner, SendAll):
            return self.whole.clone() if self.feedback else self.whole

        def one(whole: Params, kept: Params, noise: Params) -> tuple[Params, Params]:
            outside = {"noise": noise} if noise else {}
            outside |= {"inside": inside} if inside is not None else {}
            return self.inner(whole, kept, turning, **outside)

        sent, after = vmap(one)(self.flat.views(self.whole), self.kept, self.noise)
        for name, value in self.kept.items():
            value.copy_(after[name])
        return self.flat.join(sent)

    def _squares(self, rows: Tensor) -> Tensor:
        """(users, tensors) ||.||^2."""
        return torch.stack(torch._foreach_norm(self.flat.each(rows))).view(self.plan.users, -1).square()

    def _noise(self) -> Params:
        """Memory for the noise of an upload of the user's own."""
        like = drawn(self.plan.upload, self.params, Generator())
        return {name: _repeated(value, self.plan.users) for name, value in like.items()}

    def _state(self, user: int) -> Params:
        kept = {name: value[user] for name, value in self.kept.items()}
        if not self.feedback:
            return kept
        residual = {RESIDUAL + name: value for name, value in self.flat.views(self.whole[user]).items()}
        return residual | {INNER + name: value for name, value in kept.items()}


def _repeated(value: Tensor, users: int) -> Tensor:
    return torch.stack([value] * users)
