"""From what a client trained to what it sends: a base pruning's own mask, withheld weights, rewritten gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.chance import derive
from secateur.defenses.withholding import Rates, entries_sent, nothing_saved, reloaded, saved, sent
from secateur.federated.base import BasePruning
from secateur.federated.crowd import Choose, Given, Model
from secateur.federated.local import Sent, Trained
from secateur.federated.sending import drawn, makes_anew
from secateur.federated.terms import Terms
from secateur.interfaces import Batch, Mask, Params, Turning

Rows = Tensor | Sequence[Tensor]  # a step each: (steps, B), or batches of several sizes


class Update(NamedTuple):
    """What leaves a client, and what stays."""

    values: Params  # weights or gradients, exactly 0 where withheld or pruned
    buffers: Params
    sent: Mask | None  # which entries were sent; None: all that the server's mask keeps
    own_mask: Mask | None  # that the client chose itself, whatever it withholds; None: the server's
    summed: Params  # the dense gradients, of which PruneFL's clients send the squares; 0 where these spare the withheld
    state: Params  # stays at home
    withheld: Mask  # likewise; empty where no rule withholds
    rates: Rates | None = None  # how much that is, of a client elsewhere that tells no more


class Sender(Protocol):
    """What a turn needs of the server: the model that it sent, and how it prunes."""

    base: BasePruning
    prunes: bool
    weights: Params
    mask: Mask
    model: Model

    @property
    def received(self) -> Params:
        """What a client is sent: parameters and buffers."""
        ...


class Turns:
    """What the clients of a federation do around their local training."""

    def __init__(self, net: nn.Module, terms: Terms, server: Sender, examples: Callable[[Rows], Batch]) -> None:
        self.net, self.terms, self.server, self.examples = net, terms, server, examples
        self.varies = any(each is not None for each in (terms.withholding, terms.own, terms.upload))
        self.sums = terms.withholding is not None or terms.sends_gradients or server.base.wants_squares

    def init(self) -> Params:
        """A client's state before its first round; empty where it keeps nothing."""
        terms, weights = self.terms, self.server.weights
        if terms.own is not None:
            return terms.own.init(weights)
        if terms.withholding is not None:
            return nothing_saved(weights) if terms.withholding.pseudo else {}
        return {} if terms.upload is None else terms.upload.init(weights)

    @torch.no_grad()
    def start(self, state: Params) -> Params | None:
        """Where a client begins: at what it received, with what it withheld last time put back."""
        if self.terms.withholding is None or not self.terms.withholding.pseudo:
            return None
        return reloaded(self.server.model.params, state, self.server.model.mask)

    def choosing(self, number: int, seed: int) -> Choose | None:
        """What clients do with their masks in this round; None: nothing."""
        base = self.server.base
        if not (self.server.prunes and self.terms.at_client and base.adjusts(number)):
            return None
        mask = self.server.model.mask
        return lambda place, weights, grads: base.local(
            weights, grads, mask, number, derive(seed, "readjust", number, place)
        )

    @torch.no_grad()
    def update(self, made: Trained | Sent, chosen: Mask | None, one: Given, number: int, rng: Generator) -> Update:
        """What a client sends of what it trained, under a mask that it chose itself or under the server's."""
        mask = self.server.model.mask if chosen is None else chosen
        if isinstance(made, Sent):
            sending = entries_sent(made.withheld, mask)
            summed = self._shared(made.summed, made.withheld)
            return Update(made.values, {}, sending, chosen, summed, made.state, made.withheld)
        if self.terms.sends_gradients:
            return self._gradient(made, one, number, rng)
        if self.terms.withholding is None:
            covered = mask if self.terms.averaging == "coverage" else None
            return Update(made.params, made.buffers, covered, chosen, made.summed, {}, {})
        if self.terms.upload is not None:
            made = self._noised(made, one, number, rng)
        return self._withhold(made, chosen, len(one.rows), rng)

    def _withhold(self, made: Trained, chosen: Mask | None, steps: int, rng: Generator) -> Update:
        rule, mask = self.terms.withholding, self.server.model.mask if chosen is None else chosen
        assert rule is not None
        gradient = {name: value / steps for name, value in made.summed.items()}
        rng = Generator(made.loss.device).manual_seed(rng.initial_seed())  # a rule draws where its tensors are
        withheld = rule.withheld(made.params, gradient, self.server.mask if chosen is None else chosen, rng)
        state = saved(made.params, withheld) if rule.pseudo else {}
        values = sent(made.params, withheld, mask)
        summed = self._shared(made.summed, withheld)
        return Update(values, made.buffers, entries_sent(withheld, mask), chosen, summed, state, withheld)

    def _shared(self, summed: Params, withheld: Mask) -> Params:
        """The gradients of which squares leave the client."""
        if not self.server.base.spares_withheld:
            return summed
        return summed | {name: torch.where(where, 0, summed[name]) for name, where in withheld.items()}

    def _gradient(self, made: Trained, one: Given, number: int, rng: Generator) -> Update:
        """The gradient, of several steps their sum: the path from what was received over the learning rate."""
        local, received = self.terms.local, self.server.model.params
        grads = made.summed
        if not local.plain:
            grads = {name: (received[name] - value) / local.learning_rate for name, value in made.params.items()}
        grads = {name: value.contiguous() for name, value in tree.masked(grads, self.server.model.mask).items()}
        state = one.state
        if self.terms.upload is not None:
            grads, state = self._uploaded(grads, one, number, rng)
            grads = tree.masked(grads, self.server.model.mask)
        return Update(grads, self._statistics(made), None, None, made.summed, state, {})

    def _noised(self, made: Trained, one: Given, number: int, rng: Generator) -> Trained:
        """The one step of a client, by the gradient that a defense made anew: what is withheld is chosen after it."""
        grads, _ = self._uploaded(made.summed, one, number, derive(rng.initial_seed(), "upload"))
        rate = self.terms.local.learning_rate
        params = {name: value - rate * grads[name] for name, value in self._begun(one).items()}
        return made._replace(
            params=tree.masked(params, self.server.model.mask), summed=grads, buffers=self._statistics(made)
        )

    def _uploaded(self, grads: Params, one: Given, number: int, rng: Generator) -> tuple[Params, Params]:
        """What an upload makes of a gradient, and the client's state afterwards."""
        upload, batch = self.terms.upload, self.examples(one.rows)
        assert upload is not None
        begun = self._begun(one)
        batch = batch._replace(inputs=batch.inputs.to(next(iter(begun.values())).dtype))
        turning = Turning(self.net, self.server.received | begun, batch, number, rng, self.terms.local.loss)
        noise = drawn(upload, begun, rng)
        outside = {"noise": tree.to(noise, batch.inputs.device)} if noise else {}
        return upload(grads, one.state, turning, **outside)

    def _begun(self, one: Given) -> Params:
        """The parameters at which a client begins: what the mask drops is zero from the start on."""
        return tree.masked(self.server.model.params if one.start is None else one.start, self.server.model.mask)

    def _statistics(self, made: Trained) -> Params:
        """BatchNorm's, sent in the clear; none where a defense promises an epsilon, which would not cover them."""
        upload = self.terms.upload
        return {} if upload is not None and makes_anew(upload) else made.buffers
