"""What clients answer to a model that the server changed for them: their turn as ever, on another network.

A victim cannot tell. It trains, prunes and defends itself by the terms of the federation, on every weight of what it
was sent. The server makes the mask, so a block of its own is kept whole; only where clients choose their masks (feddst)
they prune it as any layer. A defense withholds and rewrites the block's weights as any, and counts them in its rate.
The answer is not averaged, as it is of another model, and the victim's state stays what it was: for the federation the
client was lost in this round, and the round's row says so. Its bytes down are counted as those of the plain model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Generator, nn

from secateur import tree
from secateur.chance import derive
from secateur.errors import WrongInput
from secateur.federated.crowd import Given, Model, Rows
from secateur.federated.sampling import Drawn
from secateur.federated.turns import Turns
from secateur.functional import joined, split
from secateur.interfaces import Mask, Params

if TYPE_CHECKING:
    from secateur.federated.federation import Federation
    from secateur.federated.server import Server


class Changed:
    """A server's side of a round with another network."""

    def __init__(self, server: Server, net: nn.Module, state: Params) -> None:
        self.net, self.base, self.prunes = net, server.base, server.prunes
        params, buffers = split(net, state)
        self.weights = tree.clone(params)
        self.prefix = prefix_of(server.weights, self.weights)
        self.mask: Mask = {self.prefix + name: keep for name, keep in server.mask.items()}
        own = [name for name in self.weights if not name.startswith(self.prefix) and self.weights[name].ndim > 1]
        self.mask |= {name: torch.ones_like(self.weights[name], dtype=torch.bool) for name in own}
        self.model = Model(self.weights, tree.clone(buffers), self.mask if self.prunes else {})

    @property
    def received(self) -> Params:
        """What a victim is sent."""
        return joined(self.net, self.model.params | self.model.buffers)


def answers(
    federation: Federation, number: int, drawn: Drawn, net: nn.Module, state: Params, victims: Sequence[int]
) -> Iterator[tuple[int, Rows, Params, Params]]:
    """Client, rows, what it sends and its BatchNorm statistics: of each victim in the order of the round."""
    terms, seed = federation.terms, federation.seed
    server = Changed(federation.server, net, state)
    turns = Turns(net, terms, server, federation.train, "sequential")
    for client, rows in zip(drawn.clients, drawn.rows, strict=True):
        if client not in victims:
            continue
        training, sending = (derive(seed, what, number, client) for what in ("tampered", "defense"))
        own = [Generator(federation.device).manual_seed(each.initial_seed()) for each in (training, sending)]
        held = _renamed(federation.states.get(client, {}), turns.init(), list(federation.server.weights), server.prefix)
        one = Given(rows, held, *turns.draws(rows, *own))
        update = next(turns([(one, sending)], number))
        yield client, rows, update.values, update.buffers


def prefix_of(own: Params, changed: Params) -> str:
    """Where a changed network holds the federation's: what stands before every one of its names.

    Example:
        >>> prefix_of({"w": torch.ones(2)}, {"imprint.w": torch.ones(9), "net.w": torch.ones(2)})
        'net.'
    """
    first = next(iter(own))
    for found in (name.removesuffix(first) for name in changed if name.endswith(first)):
        names = {found + name: value.shape for name, value in own.items()}
        if all(name in changed and changed[name].shape == shape for name, shape in names.items()):
            return found
    raise WrongInput("attack", "its model does not hold the federation's network, so clients cannot train it")


def _renamed(state: Params, fresh: Params, names: Sequence[str], prefix: str) -> Params:
    """A client's state by the names of the changed network; of what is new in it the state before a first round."""
    found = dict(fresh)
    for key, value in state.items():
        places = [key.removesuffix(name) + prefix + name for name in names if key.endswith(name)]
        found |= {place: value for place in (key, *places) if place in fresh}
    return found
