"""A client's turn, from the received model to the sent update: restore, train, choose a mask, withhold or rewrite.

`ClientTurn.update` is written for one client and also runs under vmap, because all its random draws are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn, vmap

from secateur import tree
from secateur.defenses.uploads import capturable, draw_noise, promises_epsilon
from secateur.defenses.withholding import Rates, divide, empty_state, mask_sent, put_back
from secateur.federated.base_pruning import BasePruning
from secateur.federated.client_training import (
    BroadcastModel,
    Choose,
    ClientInputs,
    ClientTrainer,
    Noise,
    Rows,
    TrainedClient,
)
from secateur.federated.spec import FederationSpec
from secateur.interfaces import Batch, ClientResult, Mask, Params, UploadContext
from secateur.seeding import derive, derive_on


class ClientUpdate(NamedTuple):
    """The result of a client's turn: the parts that are sent, and the parts that stay with the client."""

    values: Params  # weights or gradients, exactly 0 where withheld or pruned
    buffers: Params
    sent: Mask | None  # entries that were sent, if the average counts them; None: all that the server's mask keeps
    own_mask: Mask | None  # the mask that the client chose, withheld entries included; None: the server's
    summed: Params  # dense gradients, whose squares PruneFL's clients send; 0 at spared withheld entries
    state: Params  # stays with the client
    withheld: Mask  # stays with the client; empty if no rule withholds
    rates: Rates | None = None  # the withheld shares, of a remote client that reports nothing else


class BroadcastSource(Protocol):
    """The part of the server that a turn needs: the broadcast model and the base pruning."""

    base: BasePruning
    prunes: bool
    weights: Params
    mask: Mask
    model: BroadcastModel

    @property
    def received(self) -> Params:
        """The model that a client receives: parameters and buffers."""
        ...


def initial_state(terms: FederationSpec, weights: Params) -> Params:
    """Return the state that a client keeps before its first round; empty if the client keeps nothing."""
    if terms.custom_turn is not None:
        return terms.custom_turn.init(weights)
    if terms.withholding is not None:
        return empty_state(weights) if terms.withholding.pseudo else {}
    return {} if terms.upload is None else terms.upload.init(weights)


class ClientTurn:
    """The turns of a federation's clients, run one by one or stacked."""

    def __init__(
        self, net: nn.Module, terms: FederationSpec, server: BroadcastSource, data: Batch, execution: str = "auto"
    ) -> None:
        self.net, self.terms, self.server, self.data = net, terms, server, data
        rules = (terms.withholding, terms.custom_turn, terms.upload)
        self.varies = terms.sends_gradients or any(rule is not None for rule in rules)
        self.trainer = ClientTrainer(net, data, server.model, terms.local, terms.custom_turn, execution)
        self.trainer.summing = terms.withholding is not None or terms.sends_gradients or server.base.wants_squares
        self.stacks = self.trainer.stacks and (terms.upload is None or capturable(terms.upload))

    def draws(self, rows: Rows, training: Generator, sending: Generator) -> tuple[Noise, Params]:
        """Return a client's random draws, on the generators' devices: for its network, and for its defense."""
        terms, weights = self.terms, self.server.weights
        if terms.custom_turn is not None:
            return (), terms.custom_turn.noise(weights, len(rows), training)
        noise = self.trainer.noise(rows, training)
        if terms.withholding is not None:
            return noise, terms.withholding.noise(weights, sending)
        return noise, {} if terms.upload is None else draw_noise(terms.upload, weights, sending)

    def inputs(
        self, seed: int, number: int, client: int, rows: Rows, state: Params, purpose: str = "noise"
    ) -> tuple[ClientInputs, Generator]:
        """Return the inputs of a client's turn, and the generator of its upload.

        Generators belong to the client alone, so they do not depend on which other clients answer.
        """
        device = self.data.inputs.device
        training, sending = (derive_on(device, seed, label, number, client) for label in (purpose, "defense"))
        draws = self.draws(rows, training, sending)
        return ClientInputs(rows, state, *draws), derive(seed, "defense", number, client)

    def __call__(self, clients: Iterable[tuple[ClientInputs, Generator]], number: int) -> Iterator[ClientUpdate]:
        """Yield the updates of clients, one by one; each client's generator is for an upload that draws by itself."""
        received, choose = self.trainer.arrange_start(), self.choice_of_masks(number)
        for client, rng in clients:
            start = self.start(client.state)
            begun = received if start is None else self.trainer.arrange_start(start)
            trained, chosen = self.trainer.train_one(client, begun, choose)
            yield self.update(trained, chosen, client, number, rng)

    def run_many(self, many: ClientInputs, number: int, choose: Choose | None) -> ClientUpdate:
        """Return the stacked updates of many clients; all random draws are in the inputs."""
        model = self.server.model
        start = put_back(model.params, many.state, model.mask) if self.reloads else {}
        trained, chosen = self.trainer.train_many(many, start, choose)
        kind, nothing = type(trained), Generator()
        if isinstance(trained, TrainedClient) and self.terms.withholding is not None and self.terms.upload is None:
            return self._withhold(trained, chosen, many, vmap)

        def send_one(trained: Any, chosen: Mask | None, *inputs: Any) -> tuple[Any, ...]:
            update = self.update(kind(*trained), chosen, ClientInputs(*inputs), number, nothing)
            return tuple({} if part is None else part for part in update[:-1])  # vmap cannot return None

        updates = vmap(send_one, (0, None if chosen is None else 0, 0, 0, 0, 0))
        values, buffers, entries, own_mask, *others = updates(tuple(trained), chosen, *many)
        return ClientUpdate(values, buffers, entries or None, own_mask or None, *others)

    def init(self) -> Params:
        """Return a client's state before its first round; empty if the client keeps nothing."""
        return initial_state(self.terms, self.server.weights)

    @property
    def reloads(self) -> bool:
        """True if clients restore the values that they withheld."""
        return self.terms.withholding is not None and self.terms.withholding.pseudo

    @torch.no_grad()
    def start(self, state: Params) -> Params | None:
        """Return the received model with the values withheld last time restored; None: the received model itself."""
        received = self.server.model.params
        return received | put_back(received, state) if self.reloads else None

    def choice_of_masks(self, number: int) -> Choose | None:
        """Return the function by which clients choose their masks in this round; None: they choose none."""
        base = self.server.base
        if not (self.server.prunes and self.terms.at_client and base.adjusts(number)):
            return None
        mask = self.server.model.mask
        return lambda weights, grads: base.local(weights, grads, mask, number)

    @torch.no_grad()
    def update(
        self,
        trained: TrainedClient | ClientResult,
        chosen: Mask | None,
        client: ClientInputs,
        number: int,
        rng: Generator,
    ) -> ClientUpdate:
        """Return the update of one trained client, under the mask `chosen` by the client or else the server's."""
        mask = self.server.model.mask if chosen is None else chosen
        if isinstance(trained, ClientResult):
            sending = mask_sent(trained.withheld, mask) if self.terms.counts_sent else None
            summed = self._select_shared(trained.summed, trained.withheld)
            return ClientUpdate(trained.values, {}, sending, chosen, summed, trained.state, trained.withheld)
        if self.terms.sends_gradients:
            return self._gradient(trained, client, number, rng)
        if self.terms.withholding is None:
            return ClientUpdate(trained.params, trained.buffers, None, chosen, trained.summed, {}, {})
        if self.terms.upload is not None:
            trained = self._add_noise(trained, client, number, rng)
        return self._withhold(trained, chosen, client)

    def _withhold(
        self,
        trained: TrainedClient,
        chosen: Mask | None,
        client: ClientInputs,
        mapped: Callable[..., Any] = lambda function, *_: function,
    ) -> ClientUpdate:
        """Withhold entries of one client, or of many if `mapped` is vmap.

        Only the rule's own functions run under vmap; everything else works entry by entry.
        """
        rule, mask = self.terms.withholding, self.server.model.mask if chosen is None else chosen
        assert rule is not None
        steps = client.rows.shape[-2] if isinstance(client.rows, Tensor) else len(client.rows)
        gradient = trained.summed if steps == 1 else {name: value / steps for name, value in trained.summed.items()}
        mask_axis = None if chosen is None else 0  # the masks' axis of clients

        def choose(weights: Params, gradient: Params, mask: Mask, noise: Params) -> Mask:
            return rule.withheld(weights, gradient, mask, noise=noise)

        withheld = mapped(choose, (0, 0, mask_axis, 0))(trained.params, gradient, mask, client.chance)
        covered = mapped(mask_sent, (0, mask_axis))(withheld, mask) if self.terms.counts_sent else None
        values, state = divide(trained.params, withheld, rule.pseudo)
        return ClientUpdate(
            values, trained.buffers, covered, chosen, self._select_shared(trained.summed, withheld), state, withheld
        )

    def _select_shared(self, summed: Params, withheld: Mask) -> Params:
        """Return the gradients whose squares the client sends."""
        if not self.server.base.spares_withheld:
            return summed
        return summed | {name: torch.where(where, 0, summed[name]) for name, where in withheld.items()}

    def _gradient(self, trained: TrainedClient, client: ClientInputs, number: int, rng: Generator) -> ClientUpdate:
        """Return the update of a client that sends gradients.

        For several steps this is their sum: (received - trained) / learning rate.
        """
        local, received = self.terms.local, self.server.model.params
        grads = trained.summed
        if not local.is_plain:
            grads = {name: (received[name] - value) / local.learning_rate for name, value in trained.params.items()}
        grads = {name: value.contiguous() for name, value in tree.mask_tree(grads, self.server.model.mask).items()}
        state = client.state
        if self.terms.upload is not None:
            grads, state = self._upload(grads, client, number, rng)
            grads = tree.mask_tree(grads, self.server.model.mask)
        return ClientUpdate(grads, self._statistics(trained), None, None, trained.summed, state, {})

    def _add_noise(self, trained: TrainedClient, client: ClientInputs, number: int, rng: Generator) -> TrainedClient:
        """Redo the client's single step with the gradient that a defense (dp) computes again from the examples.

        The withheld entries are chosen after this step.
        """
        assert self.terms.upload is not None
        rng = derive(rng.initial_seed(), "upload")  # the draws in `client` belong to the withholding rule
        private = client._replace(chance=draw_noise(self.terms.upload, self.server.weights, rng))
        grads, _ = self._upload(trained.summed, private, number, rng)
        rate = self.terms.local.learning_rate
        params = {name: value - rate * grads[name] for name, value in self._begin(client).items()}
        return trained._replace(
            params=tree.mask_tree(params, self.server.model.mask), summed=grads, buffers=self._statistics(trained)
        )

    def _upload(self, grads: Params, client: ClientInputs, number: int, rng: Generator) -> tuple[Params, Params]:
        """Apply the upload defense to a gradient; return the sent gradient and the client's new state."""
        upload, batch, begun = self.terms.upload, self.data.take(flatten_rows(client.rows)), self._begin(client)
        assert upload is not None
        batch = batch._replace(inputs=batch.inputs.to(next(iter(begun.values())).dtype))
        turning = UploadContext(self.net, self.server.received | begun, batch, number, rng, self.terms.local.loss)
        draws = {"noise": client.chance} if client.chance else {}
        return upload(grads, client.state, turning, **draws)

    def _begin(self, client: ClientInputs) -> Params:
        """Return the parameters from which a client starts; dropped entries are zero from the start."""
        start = self.start(client.state)
        return tree.mask_tree(self.server.model.params if start is None else start, self.server.model.mask)

    def _statistics(self, trained: TrainedClient) -> Params:
        """Return BatchNorm's statistics, sent openly; none under a promised epsilon, which does not cover them."""
        upload = self.terms.upload
        return {} if upload is not None and promises_epsilon(upload) else trained.buffers


def flatten_rows(rows: Rows) -> Tensor:
    """Return the rows of all steps in their order."""
    return rows.flatten() if isinstance(rows, Tensor) else torch.cat([*rows])
