"""Uploads of sub-model clients: the trained model, a rewritten update, or the model without withheld cells.

A client's state (a residual, withheld weights) is kept in the server's coordinates. The client's channels may change in
every round, and a cell that returns gets its kept value again. A withheld cell does not count in the server's average.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.defenses.uploads import drawn
from secateur.defenses.withholding import divided, nothing_saved, reloaded
from secateur.federated.submodels.spec import SubmodelSpec
from secateur.federated.submodels.structure import SubmodelIndex, flat_of, params_of
from secateur.interfaces import Batch, Params, UploadContext


class SubmodelSent(NamedTuple):
    """The result of a client's turn: the sent parts, and the state that stays with the client."""

    flat: Tensor  # the model as the server averages it
    covered: Tensor | None  # (P_c,) 1 at sent cells, otherwise 0; None: all were sent
    message: Params | None  # the transmitted values, if they are not the model
    state: Params  # in the server's coordinates


class SubmodelUpload:
    """The step of a federation's clients from a trained model to a sent update."""

    def __init__(self, terms: SubmodelSpec, shapes: dict[str, tuple[int, ...]]) -> None:
        self.terms, self.shapes = terms, shapes
        rule = terms.withholding
        self.keeps = terms.upload is not None or (rule is not None and rule.pseudo)

    def init(self, whole: Tensor) -> Params:
        """Return a client's state before its first round; empty if the client keeps nothing."""
        if not self.keeps:
            return {}
        params = params_of(whole, self.shapes)
        return nothing_saved(params) if self.terms.upload is None else self.terms.upload.init(params)

    @torch.no_grad()
    def start(self, received: Tensor, state: Params, cut: SubmodelIndex) -> Tensor:
        """Return the received model with the values withheld last time restored."""
        if self.terms.withholding is None or not self.keeps:
            return received
        return flat_of(reloaded(params_of(received, cut.shapes), self._part(state, cut), {}))

    @torch.no_grad()
    def __call__(
        self, net: nn.Module, cut: SubmodelIndex, received: Tensor, trained: Tensor, state: Params, rng: Generator
    ) -> SubmodelSent:
        """Return the upload of a client that trained `received` into `trained`."""
        terms = self.terms
        if terms.upload is None and terms.withholding is None:
            return SubmodelSent(trained, None, None, {})
        rate, before = terms.local.learning_rate, params_of(received, cut.shapes)
        update = params_of((received - trained) / rate, cut.shapes)
        if terms.upload is not None:
            no_examples = Batch(received[:0], received[:0])  # these uploads use no examples
            turning = UploadContext(net, before, no_examples, 0, rng)
            noise = tree.to(drawn(terms.upload, before, rng), received.device)
            draws = {"noise": noise} if noise else {}
            message, after = terms.upload(update, self._part(state, cut), turning, **draws)
            return SubmodelSent(received - rate * flat_of(message), None, message, self._whole(state, after, cut))
        assert terms.withholding is not None
        values = params_of(trained, cut.shapes)
        withheld = terms.withholding.withheld(values, update, {}, rng)
        message, after = divided(values, withheld, self.keeps)
        covered = flat_of({n: ~withheld[n] if n in withheld else torch.ones_like(v) for n, v in message.items()})
        return SubmodelSent(flat_of(message), covered.to(trained.dtype), message, self._whole(state, after, cut))

    def _part(self, state: Params, cut: SubmodelIndex) -> Params:
        return {key: cut.take(self._name(key), value) for key, value in state.items()}

    def _whole(self, state: Params, part: Params, cut: SubmodelIndex) -> Params:
        return {key: cut.put(self._name(key), value, part[key]) for key, value in state.items()}

    def _name(self, key: str) -> str:
        """Return the parameter of a state's key: `residual.0.weight` belongs to `0.weight`."""
        return max((name for name in self.shapes if key == name or key.endswith(f".{name}")), key=len)
