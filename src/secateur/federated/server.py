"""The server's side of a round: broadcast, aggregation, server step, and mask adjustment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.federated.averaging import Average, zeros
from secateur.federated.client_training import BroadcastModel
from secateur.federated.client_turn import ClientUpdate
from secateur.federated.spec import FederationSpec
from secateur.federated.traffic import squares_of
from secateur.functional import join_state, split
from secateur.gpu.client_ops import add_weighted
from secateur.interfaces import Batch, Mask, Params

SAMPLES = 200  # examples that a base pruning uses before the first round


@dataclass(eq=False)
class RoundSums:
    """The aggregated updates of a round."""

    values: Average  # of weights or gradients
    statistics: Average  # of BatchNorm
    union: Mask | None = None  # entries that any client kept, if clients choose their own masks


class Server:
    """Weights, mask and momentum of the server; all tensors are changed in place, because a captured round reads them.

    `exact` sums updates in float64, for a server whose clients answer in any order.
    """

    def __init__(
        self,
        net: nn.Module,
        terms: FederationSpec,
        data: Batch,
        rng: Generator,
        device: torch.device,
        exact: bool = False,
    ) -> None:
        self.terms, self.net, self.exact = terms, net, exact
        params, buffers = split(net, tree.state_of(net))
        plain = torch.contiguous_format
        self.weights, self.buffers = (
            {n: v.detach().to(device).clone(memory_format=plain) for n, v in part.items()} for part in (params, buffers)
        )
        self.base = terms.base.bound(net, tuple(data.inputs.shape[1:]))
        share = terms.shares[int(torch.randint(len(terms.shares), (), generator=rng))]
        batch = data.take(share[torch.randperm(len(share), generator=rng)[:SAMPLES]].to(device))
        batch = batch._replace(inputs=batch.inputs.to(next(iter(self.weights.values())).dtype))
        started = self.base.start(net, join_state(net, self.weights | self.buffers), batch, rng)
        self.mask: Mask = {name: keep.to(device).clone() for name, keep in started.items()}
        self.prunes = self.base.rate > 0
        self.keeps_dropped = self.base.keeps_dropped or terms.broadcast == "dense"
        self.model = BroadcastModel(
            tree.clone(self.weights), tree.clone(self.buffers), self.mask if self.prunes else {}
        )
        self.moments = zeros(self.weights) if terms.server_momentum else {}
        self.squares = zeros(self.weights, exact) if self.base.wants_squares else {}
        self._forget_dropped()

    @property
    def received(self) -> Params:
        """The model that every client of the round receives: parameters and buffers."""
        return join_state(self.net, self.model.params | self.model.buffers)

    @property
    def density(self) -> float:
        """The share of the prunable weights that the mask keeps."""
        return tree.share_kept(self.mask)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copy the weights into the model that this round's clients read."""
        sent = self.weights if self.terms.broadcast == "dense" else tree.mask_tree(self.weights, self.model.mask)
        torch._foreach_copy_(list(self.model.params.values()), [sent[name] for name in self.model.params])
        for name, value in self.model.buffers.items():
            value.copy_(self.buffers[name])

    def begin_sums(self, own_masks: bool = False) -> RoundSums:
        """Return empty averages for this round's updates; by entry if clients choose their own masks."""
        all_sent = self.terms.averaging == "coverage" and not self.terms.counts_sent
        values = Average("weighted" if all_sent else self.terms.averaging, self.weights, self.exact, own_masks)
        return RoundSums(values, Average("weighted", self._select_floating(self.buffers), self.exact))

    def numbers(self, update: ClientUpdate) -> Params:
        """Return all tensors of an update that must be finite: also the squares, which cover unsent entries too."""
        dense = {f"squares.{name}": value for name, value in squares_of(update).items()} if self.squares else {}
        return update.values | update.buffers | dense

    @torch.no_grad()
    def add(self, gathered: RoundSums, update: ClientUpdate, size: int, alive: Tensor | None) -> None:
        """Add the complete update of one client."""
        own_mask = update.own_mask
        gathered.values.add(update.values, size, self._mask_counted(update), alive)
        if update.buffers:
            gathered.statistics.add(self._select_floating(update.buffers), size, None, alive)
        if own_mask is not None:
            union = gathered.union or {name: torch.zeros_like(keep) for name, keep in own_mask.items()}
            gathered.union = {n: union[n] | (keep if alive is None else keep & alive) for n, keep in own_mask.items()}
        if self.squares and update.summed:
            self.add_squares(squares_of(update), size, alive)

    @torch.no_grad()
    def add_stacked(self, gathered: RoundSums, update: ClientUpdate, sizes: Tensor, alive: Tensor) -> None:
        """Add the updates of many clients, tensors (clients, ...); only those that are `alive` count."""
        gathered.values.add_stacked(update.values, sizes, self._mask_counted(update), alive)
        if update.buffers:
            gathered.statistics.add_stacked(self._select_floating(update.buffers), sizes, None, alive)
        if update.own_mask is not None:
            kept = {name: keep.movedim(0, -1) & alive for name, keep in update.own_mask.items()}
            gathered.union = {name: keep.any(-1) for name, keep in kept.items()}
        if update.summed:
            weights = torch.where(alive, sizes, 0)
            for name, total in self.squares.items():
                add_weighted(total, update.summed[name], weights, squared=True)

    def _mask_counted(self, update: ClientUpdate) -> Mask | None:
        """Return the entries that an average by entry counts as the client's."""
        return update.sent if self.terms.counts_sent else update.own_mask

    @torch.no_grad()
    def add_squares(self, squares: Params, size: int, alive: Tensor | None = None) -> None:
        """Add the squares of one client's dense gradients, if the base pruning needs them."""
        for name, total in self.squares.items():
            total.add_(squares[name] if alive is None else torch.where(alive, squares[name], 0), alpha=size)

    def mean_of(self, gathered: RoundSums) -> Params:
        """Return the average of a round's weights or gradients; unsent entries: the server's weights, or 0."""
        gradients = self.terms.sends_gradients
        default = {name: torch.zeros_like(value) for name, value in self.weights.items()} if gradients else self.weights
        return gathered.values.result(default)

    def statistics_of(self, gathered: RoundSums) -> Params:
        """Return the average of the BatchNorm statistics that arrived, or else the server's."""
        return gathered.statistics.result(self._select_floating(self.buffers))

    @torch.no_grad()
    def step(self, gathered: RoundSums) -> None:
        """Set the weights to the average, or take a step towards it; dropped weights are unchanged."""
        terms, gradients, mean = self.terms, self.terms.sends_gradients, self.mean_of(gathered)
        union = gathered.union
        plain = terms.server_rate == 1 and not terms.server_momentum
        if gradients:
            change = {name: -terms.local.learning_rate * value for name, value in mean.items()}
        elif not plain:
            change = {name: value - self.weights[name] for name, value in mean.items()}
        for name, weight in self.weights.items():
            where = self.model.mask.get(name) if union is None else union.get(name)
            if plain and not gradients:
                new = mean[name]
            elif not terms.server_momentum:
                new = weight + terms.server_rate * change[name]
            else:  # unsent entries must not move: zero averages minus stale values are no steps
                moved = change[name] if where is None else torch.where(where, change[name], 0)
                self.moments[name].mul_(terms.server_momentum).add_(moved)
                new = weight + terms.server_rate * self.moments[name]
            dropped = weight if union is None else weight * (gathered.values.weight == 0)  # no update: all weights stay
            weight.copy_(new if where is None else torch.where(where, new, dropped))
        for name, value in self.statistics_of(gathered).items():
            self.buffers[name].copy_(value)

    @torch.no_grad()
    def adjust(self, number: int, rng: Generator) -> bool:
        """Let the base pruning change the mask if this round adjusts; return True if it did."""
        if not self.prunes or not self.base.adjusts(number):
            return False
        weights, mask = self.base.adjust(self.weights, self.mask, self.squares or None, number, rng)
        for held, new in ((self.weights, weights), (self.mask, mask)):
            for name, value in held.items():
                value.copy_(new[name])
        for value in self.squares.values():
            value.zero_()
        self._forget_dropped()
        return True

    @torch.no_grad()
    def _forget_dropped(self) -> None:
        if not self.keeps_dropped:
            for name, keep in self.model.mask.items():
                self.weights[name].masked_fill_(~keep, 0)

    def state(self) -> Params:
        """Return everything that the next round depends on."""
        parts = {"weights": self.weights, "buffers": self.buffers, "mask": self.mask}
        parts |= {"moments": self.moments, "squares": self.squares}
        return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}

    @torch.no_grad()
    def load(self, state: Params) -> None:
        """Resume from the output of `state`, in place."""
        for name, value in self.state().items():
            value.copy_(state[name])

    def _select_floating(self, buffers: Params) -> Params:
        return {name: value for name, value in buffers.items() if value.is_floating_point()}
