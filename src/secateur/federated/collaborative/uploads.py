"""Uploads of a step: `OneByOne` takes one user after the other, `StackedUploads` all users at once.

`StackedUploads` makes the users one axis after their backwards, for a CUDA graph of few nodes. A CPU takes `OneByOne`,
and so does a GPU for uploads that no graph can hold (defenses/uploads.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.func import vmap

from secateur import tree
from secateur.defenses.error_feedback import INNER, RESIDUAL, ErrorFeedback
from secateur.defenses.noise import GaussianNoise, move_generator
from secateur.defenses.uploads import SendAll, accumulate, draw_noise, find_aligned, inner_of
from secateur.federated.collaborative.flat_tensors import ALIGNED, Flat
from secateur.federated.collaborative.measurements import Measured, TrainingStats, mean, measure, measure_norms, square
from secateur.federated.collaborative.plan import Plan, StepMessages
from secateur.interfaces import Mask, Params, UploadContext


class OneByOne:
    """Every user's state and upload, in turn: as little memory as one user needs at a time."""

    def __init__(self, plan: Plan, params: Params, tally: TrainingStats) -> None:
        self.plan, self.params, self.tally = plan, params, tally
        self.states = [tree.clone(plan.upload.init(params)) for _ in range(plan.users)]

    def keep(self, user: int, grads: Params) -> Params:
        """Return a backward's gradient in plain strides."""
        return {name: value.contiguous() for name, value in grads.items()}

    def __call__(self, grads: list[Params], chosen: Tensor, turning: Callable[[int], UploadContext]) -> StepMessages:
        """Compress, send and average the gradients (lines 5 to 9 of Algorithm 2)."""
        wholes = [accumulate(self.plan.upload, *pair) for pair in zip(grads, self.states, strict=True)]
        inside = self._broadcast(wholes, chosen)
        sent: list[Params] = []
        measured: list[Measured] = []
        for user, (gradient, whole) in enumerate(zip(grads, wholes, strict=True)):
            sent.append(self._send(user, gradient, inside, turning(user)))
            self.tally.record_sent(user, sent[user])
            measured.append(measure(gradient, whole, sent[user]))
        if inside is not None:  # counted after the sending, which fails on a lie of a wrong form
            self.tally.broadcast(inside)
        self.tally.step(Measured(*map(torch.stack, zip(*measured, strict=True))), square(mean(grads)))
        return StepMessages(sent, inside, mean(sent))

    def _broadcast(self, wholes: list[Params], chosen: Tensor) -> Mask | None:
        """Return ADGP's positions that the chosen user broadcasts, honest or not; None for other uploads."""
        method = find_aligned(self.plan.upload)
        if method is None:
            return None
        honest = method.positions(wholes[int(chosen)])
        if self.plan.liar is None:
            return honest
        inside = self.plan.liar(int(chosen), tree.clone(honest))
        same = [name in inside and torch.equal(inside[name], where) for name, where in honest.items()]
        self.tally.sums["lies"] += not all(same)
        return inside

    def _send(self, user: int, grads: Params, inside: Mask | None, turning: UploadContext) -> Params:
        """Return one user's upload, and update the user's state."""
        state, noise = self.states[user], draw_noise(self.plan.upload, self.params, turning.rng)
        sent, after = self.plan.upload(grads, state, turning, **_list_outside(noise, inside))
        if after is not state:
            torch._foreach_copy_(list(state.values()), [after[name] for name in state])
        return sent


class StackedUploads:
    """Every user's state as views of stacked tensors, and the uploads of all users.

    The upload is written for one user and mapped over all, unless it has a method for rows. Error feedback is separated
    and done on whole rows. The residual's own memory holds gradient + residual while that is compressed. When the sent
    values are subtracted, it holds the residual again, entry by entry as in ErrorFeedback.
    """

    def __init__(self, plan: Plan, params: Params, tally: TrainingStats, flat: Flat) -> None:
        self.plan, self.params, self.tally, self.flat = plan, params, tally, flat
        self.inner, self.feedback = inner_of(plan.upload), isinstance(plan.upload, ErrorFeedback)
        self.gradients = flat.allocate(plan.users)  # gradients, filters channels last
        self.norms = flat.zeros.new_zeros(plan.users)  # of the gradients
        self.whole = flat.allocate(plan.users)  # X, the input of the compression; between two steps the residual
        self.kept = {name: _repeat(value, plan.users) for name, value in self.inner.init(params).items()}
        self.noise_rows = flat.allocate(plan.users) if type(self.inner) is GaussianNoise else None
        self.noise = flat.views(self.noise_rows) if self.noise_rows is not None else self._noise()
        self.states = [self._state(user) for user in range(plan.users)]

    def keep(self, user: int, grads: Params) -> Params:
        """Write a backward's gradient into the user's row, and return views of it."""
        row = self.gradients[user]
        self.flat.join_turned(grads, row)
        torch.linalg.vector_norm(row, out=self.norms[user])
        return self.flat.channels_last_views(row)

    def draw(self, rng: Generator) -> None:
        """Draw all users' noise of a step into the memory that a graph reads; on a GPU in one draw."""
        if self.noise_rows is not None and self.noise_rows.device.type != "cpu":
            self.noise_rows.normal_(generator=move_generator(self.noise_rows.device, rng))
        elif self.noise:
            for user in range(self.plan.users):
                for name, value in draw_noise(self.plan.upload, self.params, rng).items():
                    self.noise[name][user].copy_(value)

    def __call__(self, grads: list[Params], chosen: Tensor, turning: Callable[[int], UploadContext]) -> StepMessages:
        """Compress, send and average the gradients (lines 5 to 9 of Algorithm 2)."""
        if isinstance(self.plan.upload, SendAll):
            return self._send_all()
        self._accumulate()
        inside = self._broadcast(chosen)
        before, gradient = self._squares(self.whole), self.gradients.mean(0)
        sent = self._send(inside, turning(0))
        missing = self._squares(self.whole.sub_(sent) if self.feedback else self.whole - sent)
        self.tally.record_all_sent(sent)
        self.tally.step(measure_norms(self.norms.square(), before, missing), square({"": gradient}))
        return StepMessages([self.flat.views(row) for row in sent], inside, self.flat.views(sent.mean(0)))

    def _send_all(self) -> StepMessages:
        """Send all gradients as they are: nothing is missing, and only the average is put into plain strides."""
        gradient = self.gradients.mean(0)
        average = torch.empty_like(gradient)
        for into, value in self.flat.pairs(average, gradient):
            into.copy_(value)
        for never, value in self.flat.pairs(self.tally.rows, self.gradients):
            never.logical_and_(value == 0)
        squares = self.norms.square()
        self.tally.step(
            measure_norms(squares, squares[:, None], torch.zeros_like(squares)[:, None]), square({"": gradient})
        )
        return StepMessages(
            [self.flat.channels_last_views(row) for row in self.gradients], None, self.flat.views(average)
        )

    def _accumulate(self) -> None:
        """Write gradient + residual with error feedback, else the gradient, in plain strides."""
        for into, value in self.flat.pairs(self.whole, self.gradients):
            into.add_(value) if self.feedback else into.copy_(value)

    def _broadcast(self, chosen: Tensor) -> Mask | None:
        """Return ADGP's positions of the chosen user by an index on the device: a graph replays with other users."""
        method = find_aligned(self.plan.upload)
        if method is None:
            return None
        inside = method.positions(self.flat.views(self.whole.index_select(0, chosen)[0]))
        self.tally.broadcast(inside)
        return inside

    def _send(self, inside: Mask | None, turning: UploadContext) -> Tensor:
        """Return (users, N) uploads of all users, in separate memory."""
        defined = "compress_rows" in vars(type(self.inner))  # an inherited one need not match a subclass's upload
        by_rows = getattr(self.inner, "compress_rows", None) if defined and not self.kept else None
        if by_rows is not None:  # no row is split into tensors and joined again
            sent: Tensor = by_rows(self.whole, self.flat.sizes, ALIGNED)
            return sent

        def one(whole: Params, kept: Params, noise: Params) -> tuple[Params, Params]:
            return self.inner(whole, kept, turning, **_list_outside(noise, inside))

        compressed, after = vmap(one)(self.flat.views(self.whole), self.kept, self.noise)
        for name, value in self.kept.items():
            value.copy_(after[name])
        return self.flat.join(compressed)

    def _squares(self, rows: Tensor) -> Tensor:
        """Return (users, tensors) squared norms ||.||^2."""
        return torch.stack(torch._foreach_norm(self.flat.split_rows(rows))).view(self.plan.users, -1).square()

    def _noise(self) -> Params:
        """Return memory for the noise of an upload other than GaussianNoise."""
        like = draw_noise(self.plan.upload, self.params, Generator())
        return {name: _repeat(value, self.plan.users) for name, value in like.items()}

    def _state(self, user: int) -> Params:
        """Return views of one user's state."""
        kept = {name: value[user] for name, value in self.kept.items()}
        if not self.feedback:
            return kept
        residual = {RESIDUAL + name: value for name, value in self.flat.views(self.whole[user]).items()}
        return residual | {INNER + name: value for name, value in kept.items()}


def _list_outside(noise: Params, inside: Mask | None) -> dict[str, Params]:
    """Return the arguments of an upload that are drawn or chosen outside of it."""
    return ({"noise": noise} if noise else {}) | ({"inside": inside} if inside is not None else {})


def _repeat(value: Tensor, users: int) -> Tensor:
    """Return copies of a value for all users, (users, ...)."""
    return torch.stack([value] * users)
