"""Flower strategies for federations whose clients train a part of the model: a pruned one, or sub-models.

Both wrap the strategy of an existing app, which samples the clients and averages their replies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from secateur import tree
from secateur.config.methods import base_pruning, choice
from secateur.errors import WrongInput
from secateur.federated.averaging import zeros
from secateur.federated.base_pruning import BasePruning
from secateur.federated.faults import Refused
from secateur.federated.flower.link import MASK, arrays_of, extend_config, read_tensors, single_record, tensors_of
from secateur.federated.flower.strategies import AroundStrategy, DecodingStrategy, check_metrics
from secateur.federated.submodels.federation import Cells
from secateur.federated.submodels.networks import build_narrow, without_statistics
from secateur.federated.submodels.rules import Rule
from secateur.federated.submodels.structure import ClientAndRound, Structure, SubmodelIndex, flat_of, params_of
from secateur.interfaces import Batch, Mask, Params
from secateur.models.create import example_rows, misfit
from secateur.seeding import derive
from secateur.wire import encode_mask

WIDTH, SCALER = "secateur-width", "secateur-scaler"  # of a message's configuration


class PrunedStrategy(DecodingStrategy):
    """A strategy whose model is pruned by a base pruning (priprune Table 1), for unchanged client apps.

    The server sends the pruned model, and prunes replies before the inner strategy averages them. The message's
    configuration holds the mask: a client with `upload_mod(..., wire=True)` sends the kept entries only.

    PruneFL and random adjust the mask over the rounds. For PruneFL the squares of the clients' dense updates take the
    place of squared gradients; they are equal up to a factor for one local step. So its clients do not get the mask.

    Args:
        inner: the strategy that averages.
        base: the base pruning, also as text such as snip:rate=0.5.
        net: the network, whose state has the names of the arrays.
        batch: examples that the server may have, for the first mask; random and synflow need their shape only.
        seed: of the first mask and of its adjustments.
    """

    def __init__(
        self, inner: Strategy, base: BasePruning | str, net: nn.Module, batch: Batch, *, seed: int = 0
    ) -> None:
        super().__init__(inner)
        rule: BasePruning = base_pruning(base).make() if isinstance(base, str) else base
        if type(rule).local is not BasePruning.local:
            raise WrongInput(
                "base", f"{type(rule).__name__} lets clients choose their masks; use snip, random or prunefl"
            )
        self.base, self.net, self.batch, self.seed = rule.bound(net, tuple(batch.inputs.shape[1:])), net, batch, seed
        self.mask: Mask = {}
        self.weights: Params = {}  # with the last values of dropped weights
        self.squares: Params = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the first mask, and send the pruned model."""
        if not self.mask:
            self._start(tensors_of(arrays))
        messages = list(self.inner.configure_train(server_round, self._prune(arrays), config, grid))
        bits = {} if self.base.wants_squares else {MASK: encode_mask(self.mask)}
        contents: dict[int, RecordDict] = {}  # one for all messages of one content, which Flower then stores once
        for message in messages:
            key = id(message.content)
            contents[key] = contents.get(key) or extend_config(message.content, bits)
            message.content = contents[key]
        return self._remember(messages)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the pruned model."""
        return self.inner.configure_evaluate(server_round, self._prune(arrays), config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the pruned replies, and adjust the mask in rounds that do."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            return None, metrics
        for name, value in tensors_of(arrays).items():
            keep = self.mask.get(name)
            self.weights[name] = value if keep is None else torch.where(keep, value, self.weights[name])
        if self.base.adjusts(server_round):
            params = {name: self.weights[name] for name, _ in self.net.named_parameters()}
            rng = derive(self.seed, "adjust", server_round)
            weights, self.mask = self.base.adjust(params, self.mask, self.squares or None, server_round, rng)
            self.weights |= weights
            self.squares = zeros(self.squares)
        return arrays_of(tree.mask_tree(self.weights, self.mask)), metrics

    def _start(self, model: Params) -> None:
        if problem := misfit(tree.state_of(self.net), model):
            raise WrongInput("net", f"does not fit the arrays of this app: {problem}")
        self.mask = self.base.start(self.net, model, self.batch, derive(self.seed, "base pruning"))
        self.weights = model
        self.squares = zeros({name: model[name] for name in self.mask}) if self.base.wants_squares else {}

    def _prune(self, arrays: ArrayRecord) -> ArrayRecord:
        return arrays_of(tree.mask_tree(tensors_of(arrays), self.mask))

    def _decode(self, reply: Message) -> Message | None:
        """Prune a reply's weights, and add the squares of its update."""
        decoded = super()._decode(reply)
        if decoded is None or decoded.has_error():
            return decoded
        name, record = single_record(decoded.content, "a client's reply")
        weights, sent = tensors_of(record), self.asked[reply.metadata.src_node_id].sent
        for key, total in self.squares.items():
            total += count_examples(decoded, self.inner) * (sent[key] - weights[key]).square()
        decoded.content[name] = arrays_of(tree.mask_tree(weights, self.mask))
        return decoded


def count_examples(reply: Message, strategy: Strategy) -> float:
    """Return the weight of a checked reply in the average of a strategy."""
    (metrics,) = reply.content.metric_records.values()
    return float(metrics[getattr(strategy, "weighted_by_key", "num-examples")])  # type: ignore[arg-type]


class SubmodelStrategy(AroundStrategy):
    """A strategy that sends every node a sub-model of its width, and merges what comes back (mapp_fl Figure 2).

    Every number of the model is averaged over the clients that trained it; one that nobody trained stays. The inner
    strategy gets whole models: each client's part, and the merged values elsewhere. So a weighted average of them is
    the merged model, and server optimisers work as usual. The client builds its network by `network_of`. BatchNorm's
    statistics are not sent, and stay as they began.

    Args:
        inner: the strategy that samples clients and averages.
        net: the server's whole network.
        input_shape: of one example, without the batch.
        rates: the share of each layer's channels, by client; nodes take them in turn, in the order of their ids.
        rule: the channel rule, also as text: mapp-fl, heterofl, fdropout and others.
        scaler: True to divide the outputs of narrow layers by their share (HeteroFL).
    """

    def __init__(
        self,
        inner: Strategy,
        net: nn.Module,
        input_shape: tuple[int, ...],
        *,
        rates: Sequence[float],
        rule: Rule | str = "mapp-fl",
        scaler: bool = True,
    ) -> None:
        super().__init__(inner)
        self.rule: Rule = choice("submodel", rule).make() if isinstance(rule, str) else rule
        if self.rule.alone or self.rule.whole:
            raise WrongInput("rule", f"{type(self.rule).__name__} cuts no sub-models; use mapp-fl or heterofl")
        self.structure = Structure(without_statistics(net), input_shape)
        self.structure.check(self.rule, rates)
        self.rates, self.scaler = list(rates), scaler
        self.numbers: dict[int, int] = {}  # of clients, by node
        self.model: Params = {}
        self._cuts: dict[int, SubmodelIndex] = {}  # of the round, by node

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Cut the sub-model of each client that the inner strategy asks."""
        self.model, self._cuts = tensors_of(arrays), {}
        if missing := [name for name in self.structure.shapes if name not in self.model]:
            raise WrongInput("net", f"has {missing[0]}, and the arrays do not; start with the state of this network")
        messages = self.inner.configure_train(server_round, arrays, config, grid)
        return self._remember(self._cut(server_round, messages, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send each client its sub-model of the round, to evaluate it."""
        self.model = tensors_of(arrays)
        return self._cut(server_round, self.inner.configure_evaluate(server_round, arrays, config, grid), grid)

    def _cut(self, number: int, messages: Iterable[Message], grid: Grid) -> list[Message]:
        for node in sorted(grid.get_node_ids()):
            self.numbers.setdefault(node, len(self.numbers))
        clients, messages = max(len(self.rates), len(self.numbers)), list(messages)
        for message in messages:
            node = message.metadata.dst_node_id
            client = self.numbers[node]
            rate = self.rates[client % len(self.rates)]
            cut = self._cuts[node] = self.structure.cut(self.rule, ClientAndRound(client, clients, number), rate)
            name, _ = single_record(message.content, "the message to a client")
            part = arrays_of({key: cut.take(key, self.model[key]) for key in cut.parts})
            content = extend_config(message.content, {WIDTH: float(rate), SCALER: self.scaler})
            message.content = RecordDict({**content, name: part})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the sub-models, and let the inner strategy average them as whole models."""
        kept, parts = [], list[tuple[Message, str, Params]]()
        cells = Cells(flat_of({name: self.model[name] for name in self.structure.shapes}), exact=True)
        for reply in replies:
            if reply.has_error():
                kept.append(reply)
                continue
            node = reply.metadata.src_node_id
            try:
                name, weights = self.read_reply(reply)
                check_metrics(reply, self.inner)
            except (WrongInput, Refused) as error:
                log(WARNING, "ignoring the update of node %s (%s)", node, error)
                continue
            flat = flat_of({key: weights[key] for key in self._cuts[node].shapes})
            cells.add(self._cuts[node].index, flat, count_examples(reply, self.inner))
            parts.append((reply, name, weights))
        merged = self.model | params_of(cells.average("keep"), self.structure.shapes)
        for reply, name, weights in parts:
            cut = self._cuts[reply.metadata.src_node_id]
            whole = {key: cut.put(key, merged[key], value) for key, value in weights.items()}
            reply.content[name] = arrays_of(merged | whole)
        return self.inner.aggregate_train(server_round, kept + [reply for reply, _, _ in parts])


def network_of(message: Message, net: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    """Return the network of the width that a message of `SubmodelStrategy` has, with the weights in it.

    Args:
        message: the server's message.
        net: the whole network; its weights mean nothing.
        input_shape: of one example, without the batch.
    """
    config: Mapping[str, Any] = next(iter(message.content.config_records.values()), {})
    whole = without_statistics(net)
    with torch.no_grad():
        classes = whole(example_rows(whole, input_shape)).shape[1]
    rate, scaler = float(config.get(WIDTH, 1.0)), bool(config.get(SCALER, False))
    narrow = build_narrow(whole, Structure(whole, input_shape), rate, scaler, input_shape, classes)
    _, record = single_record(message.content, "the message to a client")
    narrow.load_state_dict(read_tensors(record, dict(narrow.named_parameters())), strict=False)
    return narrow
