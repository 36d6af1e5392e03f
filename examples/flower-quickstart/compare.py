"""The quickstart with and without its one more line, in Flower's simulation: what goes up, and what a server sees.

    python examples/flower-quickstart/compare.py [--iterations N] [--out DIR]

A minute on two cores; each run has a page with every picture and what the attack made of it. The defended run is
attacked twice: by a server that does not know of the line, and by one that does.
"""

from __future__ import annotations

import secateur.federated.flower  # noqa: F401 (first, as it turns off what Flower reports home)

# isort: split
import argparse
import logging
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from quickstart import client_app
from quickstart.task import CLIENTS, RATE, network, picture_of
from secateur.federated.flower import AuditedStrategy, Auditor, DecodingStrategy
from secateur.federated.flower.link import single_record, size_of
from secateur.interfaces import Batch, Knowledge

ROUNDS = 2


class Counting(FedAvg):
    """Federated averaging that counts the bytes of plain updates."""

    bytes_up = 0

    def aggregate_train(self, server_round, replies):  # noqa: ANN001, ANN201 (as FedAvg has it)
        """Count, then average."""
        replies = list(replies)
        self.bytes_up += sum(size_of(single_record(reply.content, "a reply")[1]) for reply in replies)
        return super().aggregate_train(server_round, replies)


def truth(number: int, reply: Message) -> Batch:
    """What an update was made of: here we may look, to score what the attack finds."""
    return Batch(*picture_of(int(reply.content["metrics"]["client"]), number))


def measured(defended: bool, out: Path, iterations: int, attacks: list[str]) -> tuple[int, list[float]]:
    """Bytes up, and how near the server comes to the clients' pictures by each attack."""
    ones = torch.ones(1, 1, 1)
    known = Knowledge(network(), (1, 8, 8), 10, 0 * ones, ones, local_steps=1, learning_rate=RATE)
    auditor = Auditor(known, attacks, out, defense="dgp" if defended else "none", iterations=iterations)
    average = Counting(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    audited = AuditedStrategy(average, auditor, updates=CLIENTS, truth=truth)
    strategy = DecodingStrategy(audited) if defended else audited
    server, client = ServerApp(), client_app.app if defended else ClientApp()
    if not defended:
        client.train()(client_app.turn)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=ROUNDS, timeout=300)

    shares = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, client, CLIENTS, backend_config={"client_resources": shares})
    near: dict[str, list[float]] = {}
    for row in auditor.rows:
        if row.metric == "psnr" and row.extra["item"] is not None:
            near.setdefault(row.attack, []).append(row.value)
    size = strategy.bytes_up if defended else average.bytes_up
    return size, [sum(values) / len(values) for values in near.values()]


def main() -> None:
    """Run both, and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--attack", default="ig:tv=0.0001", help="of a server that does not know of DGP")
    parser.add_argument("--out", type=Path, default=Path("runs/flower-quickstart"))
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for defended in (False, True):
        out = given.out / ("defended" if defended else "plain")
        attacks = [given.attack, f"{given.attack}:adaptive=support"] if defended else [given.attack]
        size, psnr = measured(defended, out, given.iterations, attacks)
        print(f"{out.name}: {size} bytes up, PSNR {psnr[0]:.1f} dB, the page: {out / 'report.html'}", flush=True)
    print(f"defended, but the server knows of DGP: PSNR {psnr[1]:.1f} dB", flush=True)


if __name__ == "__main__":
    main()
