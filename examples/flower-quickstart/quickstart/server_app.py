"""The server: federated averaging. DecodingStrategy reads the wire format, AuditedStrategy looks closer."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from quickstart.task import network
from secateur.federated.flower import AuditedStrategy, Auditor, DecodingStrategy
from secateur.interfaces import Knowledge

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and say how many bytes came up."""
    strategy: Strategy = FedAvg(fraction_evaluate=0.0)
    if context.run_config["audit"]:
        rate, ones = float(context.run_config["learning-rate"]), torch.ones(1, 1, 1)
        known = Knowledge(network(), (1, 8, 8), 10, 0 * ones, ones, local_steps=1, learning_rate=rate)
        strategy = AuditedStrategy(
            strategy, Auditor(known, "ig:tv=0.0001", str(context.run_config["audit"]), iterations=500)
        )
    strategy = DecodingStrategy(strategy)
    rounds = int(context.run_config["rounds"])
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds, timeout=120)
    print(f"bytes up: {strategy.bytes_up}, as arrays they would be {strategy.dense_bytes}", flush=True)
