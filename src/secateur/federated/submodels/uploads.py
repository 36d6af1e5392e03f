"""From what a client trained to what it sends: all of it, a rewritten update, or all but what it withholds.

A client's state (a residual, withheld weights) is kept in the server's coordinates: its channels may be others in every
round, and a cell that comes again finds what was kept for it. A withheld cell does not count in the server's average.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.defenses.uploads import drawn
from secateur.defenses.withholding import nothing_saved, reloaded, saved, sent
from secateur.federated.submodels.spec import Terms
from secateur.federated.submodels.structure import Cut, flat_of, params_of
from secateur.interfaces import Batch, Params, Turning


class Sent(NamedTuple):
    """What leaves a client, and what stays."""

    flat: Tensor  # the model as the server takes it
    covered: Tensor | None  # (P_c,) 1 where a cell was sent, else 0; None: all
    message: Params | None  # what goes over the wire, where that is not the model
    state: Params  # in the server's coordinates


class Sender:
    """What the clients of a federation do with what they trained."""

    def __init__(self, terms: Terms, shapes: dict[str, tuple[int, ...]]) -> None:
        self.terms, self.shapes = terms, shapes
        rule = terms.withholding
        self.keeps = terms.upload is not None or (rule is not None and rule.pseudo)

    def init(self, whole: Tensor) -> Params:
        """A client's state before its first round; empty where it keeps nothing."""
        if not self.keeps:
            return {}
        params = params_of(whole, self.shapes)
        return nothing_saved(params) if self.terms.upload is None else self.terms.upload.init(params)

    @torch.no_grad()
    def start(self, received: Tensor, state: Params, cut: Cut) -> Tensor:
        """Where a client begins: at what it received, with what it withheld last time put back."""
        if self.terms.withholding is None or not self.keeps:
            return received
        return flat_of(reloaded(params_of(received, cut.shapes), self._part(state, cut), {}))

    @torch.no_grad()
    def __call__(self, net: nn.Module, cut: Cut, received: Tensor, made: Tensor, state: Params, rng: Generator) -> Sent:
        """What a client sends."""
        terms = self.terms
        if terms.upload is None and terms.withholding is None:
            return Sent(made, None, None, {})
        rate, before = terms.local.learning_rate, params_of(received, cut.shapes)
        update = params_of((received - made) / rate, cut.shapes)
        if terms.upload is not None:
            nothing = Batch(received[:0], received[:0])  # these uploads look at no example
            turning = Turning(net, before, nothing, 0, rng)
            noise = tree.to(drawn(terms.upload, before, rng), received.device)
            outside = {"noise": noise} if noise else {}
            message, after = terms.upload(update, self._part(state, cut), turning, **outside)
            return Sent(received - rate * flat_of(message), None, message, self._whole(state, after, cut))
        assert terms.withholding is not None
        values = params_of(made, cut.shapes)
        withheld = terms.withholding.withheld(values, update, {}, rng)
        message = sent(values, withheld, {})
        covered = flat_of({n: ~withheld[n] if n in withheld else torch.ones_like(v) for n, v in message.items()})
        after = saved(values, withheld) if self.keeps else {}
        return Sent(flat_of(message), covered.to(made.dtype), message, self._whole(state, after, cut))

    def _part(self, state: Params, cut: Cut) -> Params:
        return {key: cut.take(self._name(key), value) for key, value in state.items()}

    def _whole(self, state: Params, part: Params, cut: Cut) -> Params:
        return {key: cut.put(self._name(key), value, part[key]) for key, value in state.items()}

    def _name(self, key: str) -> str:
        """The parameter that a part of a state belongs to: `residual.0.weight` to `0.weight`."""
        return max((name for name in self.shapes if key == name or key.endswith(f".{name}")), key=len)
