"""Uploads of a step all at once: the users are one axis after their backwards, for a CUDA graph of few nodes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.func import vmap

from secateur.defenses.error_feedback import INNER, RESIDUAL, ErrorFeedback
from secateur.defenses.noise import GaussianNoise, on_device
from secateur.federated.flat import ALIGNED, Flat
from secateur.federated.plan import Plan
from secateur.federated.sending import SendAll, aligned, drawn, inner_of
from secateur.federated.steps import Exchanged
from secateur.federated.tally import Tally, measured, square
from secateur.interfaces import Mask, Params, Turning


class Stacked:
    """Every user's state as views of stacked tensors, and what all of them send.

    The upload is written for one user and mapped over all, unless it has a way of its own for rows. Error feedback is
    taken out of it and done on whole rows: the residual's own memory holds gradient + residual while that is
    compressed, and again the residual when what is sent was taken away, entry by entry as error_feedback.py does it.
    """

    def __init__(self, plan: Plan, params: Params, tally: Tally, flat: Flat) -> None:
        self.plan, self.params, self.tally, self.flat = plan, params, tally, flat
        self.inner, self.feedback = inner_of(plan.upload), isinstance(plan.upload, ErrorFeedback)
        self.found = flat.new(plan.users)  # gradients, filters channels last
        self.norms = flat.zeros.new_zeros(plan.users)  # theirs
        self.whole = flat.new(plan.users)  # X, what is compressed; between two steps the residual
        self.kept = {name: _repeated(value, plan.users) for name, value in self.inner.init(params).items()}
        self.noise_rows = flat.new(plan.users) if type(self.inner) is GaussianNoise else None
        self.noise = flat.views(self.noise_rows) if self.noise_rows is not None else self._noise()
        self.states = [self._state(user) for user in range(plan.users)]

    def keep(self, user: int, grads: Params) -> Params:
        """A backward's gradient, as a row of all."""
        row = self.found[user]
        self.flat.join_turned(grads, row)
        torch.linalg.vector_norm(row, out=self.norms[user])
        return self.flat.turned(row)

    def room(self) -> Params:
        """Where all users' gradients go, (users, ...), without one backward each."""
        return self.flat.turned(self.found)

    def filled(self, room: Params) -> list[Params]:
        """What is in the room now, by user."""
        torch.linalg.vector_norm(self.found, dim=1, out=self.norms)
        return [{name: value[user] for name, value in room.items()} for user in range(self.plan.users)]

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
        if isinstance(self.plan.upload, SendAll):
            return self._send_all()
        self._accumulate()
        inside = self._broadcast(chosen)
        before, found = self._squares(self.whole), self.found.mean(0)
        sent = self._send(inside, turning(0))
        missing = self._squares(self.whole.sub_(sent) if self.feedback else self.whole - sent)
        self.tally.sent_by_all(sent)
        self.tally.step(measured(self.norms.square(), before, missing), square({"": found}))
        return Exchanged([self.flat.views(row) for row in sent], inside, self.flat.views(sent.mean(0)))

    def _send_all(self) -> Exchanged:
        """Nothing is missing, one average is that of both, and it alone is put into plain strides."""
        found = self.found.mean(0)
        average = torch.empty_like(found)
        for into, value in self.flat.pairs(average, found):
            into.copy_(value)
        for never, value in self.flat.pairs(self.tally.rows, self.found):
            never.logical_and_(value == 0)
        squares = self.norms.square()
        self.tally.step(measured(squares, squares[:, None], torch.zeros_like(squares)[:, None]), square({"": found}))
        return Exchanged([self.flat.turned(row) for row in self.found], None, self.flat.views(average))

    def _accumulate(self) -> None:
        """Gradient + residual with error feedback, else the gradient, in plain strides."""
        for into, value in self.flat.pairs(self.whole, self.found):
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
        """(users, N) what everybody sends, in memory of its own."""
        own = "compress_rows" in vars(type(self.inner))  # one that is inherited need not be what is called here
        by_rows = getattr(self.inner, "compress_rows", None) if own and not self.kept else None
        if by_rows is not None:  # nothing is cut up and joined again
            sent: Tensor = by_rows(self.whole, self.flat.sizes, ALIGNED)
            return sent

        def one(whole: Params, kept: Params, noise: Params) -> tuple[Params, Params]:
            outside = {"noise": noise} if noise else {}
            outside |= {"inside": inside} if inside is not None else {}
            return self.inner(whole, kept, turning, **outside)

        compressed, after = vmap(one)(self.flat.views(self.whole), self.kept, self.noise)
        for name, value in self.kept.items():
            value.copy_(after[name])
        return self.flat.join(compressed)

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
