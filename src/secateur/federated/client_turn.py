"""A client's turn, from what it received to what it sends: put back, train, choose a mask, withhold or rewrite.

`Turns.update` is written for one client and runs under vmap too: all that it draws is in what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn, vmap

from secateur import tree
from secateur.defenses.uploads import capturable, drawn, makes_anew
from secateur.defenses.withholding import Rates, divided, entries_sent, nothing_saved, put_back
from secateur.federated.base_pruning import BasePruning
from secateur.federated.client_training import Choose, Crowd, Given, Model, Noise, Rows, Trained
from secateur.federated.spec import Terms
from secateur.interfaces import Batch, Mask, Params, Sent, Turning
from secateur.seeding import derive


class Update(NamedTuple):
    """What leaves a client, and what stays."""

    values: Params  # weights or gradients, exactly 0 where withheld or pruned
    buffers: Params
    sent: Mask | None  # which entries were sent, where an average counts them; None: all that the server's mask keeps
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
    """The turns of a federation's clients, one or many."""

    def __init__(self, net: nn.Module, terms: Terms, server: Sender, data: Batch, way: str = "auto") -> None:
        self.net, self.terms, self.server, self.data = net, terms, server, data
        self.varies = any(each is not None for each in (terms.withholding, terms.own, terms.upload))
        self.crowd = Crowd(net, data, server.model, terms.local, terms.own, way)
        self.crowd.summing = terms.withholding is not None or terms.sends_gradients or server.base.wants_squares
        self.stacks = self.crowd.stacks and (terms.upload is None or capturable(terms.upload))

    def draws(self, rows: Rows, training: Generator, sending: Generator) -> tuple[Noise, Params]:
        """All that a client draws, where the generators are: what its network does, and the chance of a rule."""
        terms, weights = self.terms, self.server.weights
        if terms.own is not None:
            return (), terms.own.noise(weights, len(rows), training)
        noise = self.crowd.noise(rows, training)
        if terms.withholding is not None:
            return noise, terms.withholding.noise(weights, sending)
        return noise, {} if terms.upload is None else drawn(terms.upload, weights, sending)

    def __call__(self, given: Iterable[tuple[Given, Generator]], number: int) -> Iterator[Update]:
        """What clients send, one by one; each has a generator for an upload that draws by itself."""
        received, choose = self.crowd.received(), self.choosing(number)
        for one, rng in given:
            start = self.start(one.state)
            begun = received if start is None else self.crowd.received(start)
            made, chosen = self.crowd.one(one, begun, choose)
            yield self.update(made, chosen, one, number, rng)

    def many(self, many: Given, number: int, choose: Choose | None) -> Update:
        """The same of many, stacked; nothing draws but what is given."""
        model = self.server.model
        start = put_back(model.params, many.state, model.mask) if self.reloads else {}
        made, chosen = self.crowd.many(many, start, choose)
        kind, nothing = type(made), Generator()
        if isinstance(made, Trained) and self.terms.withholding is not None and self.terms.upload is None:
            return self._withhold(made, chosen, many, vmap)

        def sent(made: Any, chosen: Mask | None, *given: Any) -> tuple[Any, ...]:
            update = self.update(kind(*made), chosen, Given(*given), number, nothing)
            return tuple({} if part is None else part for part in update[:-1])  # vmap knows no None

        turned = vmap(sent, (0, None if chosen is None else 0, 0, 0, 0, 0))
        values, buffers, entries, own, *others = turned(tuple(made), chosen, *many)
        return Update(values, buffers, entries or None, own or None, *others)

    def init(self) -> Params:
        """A client's state before its first round; empty where it keeps nothing."""
        terms, weights = self.terms, self.server.weights
        if terms.own is not None:
            return terms.own.init(weights)
        if terms.withholding is not None:
            return nothing_saved(weights) if terms.withholding.pseudo else {}
        return {} if terms.upload is None else terms.upload.init(weights)

    @property
    def reloads(self) -> bool:
        """Whether clients put back what they withheld."""
        return self.terms.withholding is not None and self.terms.withholding.pseudo

    @torch.no_grad()
    def start(self, state: Params) -> Params | None:
        """Where a client begins: at what it received, with what it withheld last time put back."""
        received = self.server.model.params
        return received | put_back(received, state) if self.reloads else None

    def choosing(self, number: int) -> Choose | None:
        """What clients do with their masks in this round; None: nothing."""
        base = self.server.base
        if not (self.server.prunes and self.terms.at_client and base.adjusts(number)):
            return None
        mask = self.server.model.mask
        return lambda weights, grads: base.local(weights, grads, mask, number)

    @torch.no_grad()
    def update(self, made: Trained | Sent, chosen: Mask | None, one: Given, number: int, rng: Generator) -> Update:
        """What a client sends of what it trained, under a mask that it chose itself or under the server's."""
        mask = self.server.model.mask if chosen is None else chosen
        if isinstance(made, Sent):
            sending = entries_sent(made.withheld, mask) if self.terms.counts_sent else None
            summed = self._shared(made.summed, made.withheld)
            return Update(made.values, {}, sending, chosen, summed, made.state, made.withheld)
        if self.terms.sends_gradients:
            return self._gradient(made, one, number, rng)
        if self.terms.withholding is None:
            return Update(made.params, made.buffers, None, chosen, made.summed, {}, {})
        if self.terms.upload is not None:
            made = self._noised(made, one, number, rng)
        return self._withhold(made, chosen, one)

    def _withhold(
        self, made: Trained, chosen: Mask | None, given: Given, each: Callable[..., Any] = lambda function, *_: function
    ) -> Update:
        """Of one client, or where `each` is vmap of many: only what a rule does by itself is under it."""
        rule, mask = self.terms.withholding, self.server.model.mask if chosen is None else chosen
        assert rule is not None
        steps = given.rows.shape[-2] if isinstance(given.rows, Tensor) else len(given.rows)
        gradient = made.summed if steps == 1 else {name: value / steps for name, value in made.summed.items()}
        own = None if chosen is None else 0  # the axis of masks

        def choose(weights: Params, gradient: Params, mask: Mask, noise: Params) -> Mask:
            return rule.withheld(weights, gradient, mask, noise=noise)

        withheld = each(choose, (0, 0, own, 0))(made.params, gradient, mask, given.chance)
        covered = each(entries_sent, (0, own))(withheld, mask) if self.terms.counts_sent else None
        values, state = divided(made.params, withheld, rule.pseudo)
        return Update(values, made.buffers, covered, chosen, self._shared(made.summed, withheld), state, withheld)

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
        assert self.terms.upload is not None
        rng = derive(rng.initial_seed(), "upload")  # what it is given was drawn by the rule that withholds
        alone = one._replace(chance=drawn(self.terms.upload, self.server.weights, rng))
        grads, _ = self._uploaded(made.summed, alone, number, rng)
        rate = self.terms.local.learning_rate
        params = {name: value - rate * grads[name] for name, value in self._begun(one).items()}
        return made._replace(
            params=tree.masked(params, self.server.model.mask), summed=grads, buffers=self._statistics(made)
        )

    def _uploaded(self, grads: Params, one: Given, number: int, rng: Generator) -> tuple[Params, Params]:
        """What an upload makes of a gradient, and the client's state afterwards."""
        upload, batch, begun = self.terms.upload, self.data.take(flat(one.rows)), self._begun(one)
        assert upload is not None
        batch = batch._replace(inputs=batch.inputs.to(next(iter(begun.values())).dtype))
        turning = Turning(self.net, self.server.received | begun, batch, number, rng, self.terms.local.loss)
        outside = {"noise": one.chance} if one.chance else {}
        return upload(grads, one.state, turning, **outside)

    def _begun(self, one: Given) -> Params:
        """The parameters at which a client begins: what the mask drops is zero from the start on."""
        start = self.start(one.state)
        return tree.masked(self.server.model.params if start is None else start, self.server.model.mask)

    def _statistics(self, made: Trained) -> Params:
        """BatchNorm's, sent in the clear; none where a defense promises an epsilon, which would not cover them."""
        upload = self.terms.upload
        return {} if upload is not None and makes_anew(upload) else made.buffers


def flat(rows: Rows) -> Tensor:
    """The rows of all steps in their order."""
    return rows.flatten() if isinstance(rows, Tensor) else torch.cat([*rows])
