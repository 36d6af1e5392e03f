"""The server: one strategy inside another, the agreement outermost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from digits_app.task import SHAPE, TRAIN, accuracy, digits, network
from secateur.federated.flower import AgreedStrategy, DecodingStrategy, PrunedStrategy, SubmodelStrategy
from secateur.interfaces import Batch

app = ServerApp()


def build_strategy(config: Mapping[str, Any]) -> AgreedStrategy:
    """The strategy of a run's config."""
    average = FedAvg(fraction_evaluate=0.0)
    inner: Strategy = DecodingStrategy(average)
    if config["model"] == "pruned":
        public = Batch(*(part[TRAIN : TRAIN + 100] for part in digits()))  # pictures that the server may have
        inner = PrunedStrategy(average, "snip:rate=0.5", network(), public)
    if config["model"] == "submodels":
        inner = SubmodelStrategy(average, network(), SHAPE, rates=[1.0, 0.5, 0.5, 0.5], rule="mapp-fl")
    keys = [path for path in str(config["keys"]).split(",") if path]
    return AgreedStrategy(inner, str(config["secateur-defense"]), keys=keys or None)


def run(grid: Grid, config: Mapping[str, Any], messages: ConfigRecord | None = None) -> None:
    """Train, and say how it went; `messages` is what every message's configuration has."""
    strategy = build_strategy(config)
    arrays, rounds = ArrayRecord(network().state_dict()), int(config["rounds"])
    result = strategy.start(grid, arrays, num_rounds=rounds, timeout=300, train_config=messages)
    net = network()
    if len(result.arrays):
        net.load_state_dict(result.arrays.to_torch_state_dict())
    counts = f"{len(strategy.statements)} updates as agreed, {len(strategy.breaches)} breaches"
    print(f"{config['model']}: accuracy {accuracy(net):.3f}, {counts}, {len(strategy.refusals)} refusals", flush=True)
    for reply in strategy.breaches + strategy.refusals:
        print(f"  round {reply.round}, node {reply.node}: {reply.reason}", flush=True)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train by the run's config."""
    run(grid, context.run_config)
