"""Flower's secure aggregation (SecAgg+) in its simulation: what the server sees, attacked, with and without noise.

    python examples/flower-quickstart/secure_sum.py [--clients N] [--iterations N] [--noise Z] [--out DIR]

Flower has SecAgg+ in its older interface, so the client here is a NumPyClient. Every client trains on one picture. The
server sees the sum alone, and our auditor attacks it. Then every client adds its share of Gaussian noise: the sum has
an epsilon for each client, if all are honest and answer.
"""

from __future__ import annotations

import secateur.federated.flower  # noqa: F401 (first, as it turns off what Flower reports home)

# isort: split
import argparse
import logging
from functools import partial
from pathlib import Path

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from quickstart.task import RATE, network, picture_of, train
from secateur.defenses.distributed_dp import DistributedPrivacy
from secateur.federated.flower import AuditedSum, Auditor, upload_mod
from secateur.interfaces import Batch, Knowledge

CLIPPING, LEVELS = 8.0, 2**22  # Flower's defaults: weights in [-8, 8] become integers below 2**22
NORM = 0.1  # of a client's update, which is its learning rate times a gradient


class Digits(NumPyClient):
    """A client that trains one step on one picture, and counts as one example."""

    def __init__(self, client: int) -> None:
        self.client = client

    def fit(self, parameters, config):  # noqa: ANN001, ANN201 (as NumPyClient has it)
        """Train from the received arrays."""
        net = network()
        names = net.state_dict()
        net.load_state_dict({n: torch.as_tensor(a) for n, a in zip(names, parameters, strict=True)})
        train(net, *picture_of(self.client, int(config["server-round"])), RATE)
        return [value.numpy() for value in net.state_dict().values()], 1, {}


def client_of(context: Context) -> Client:
    """Return the client of a node."""
    return Digits(int(context.node_config["partition-id"])).to_client()


def pictures_of(clients: int, number: int) -> Batch:
    """Return what the clients of a round trained on: here we may look, to score what the attack finds."""
    parts = [picture_of(client, number) for client in range(clients)]
    return Batch(torch.cat([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts]))


def average_plainly(clients: int) -> dict[str, torch.Tensor]:
    """Return the average of the clients' weights after the first round, without any protocol."""
    states = []
    for client in range(clients):
        net = network()
        train(net, *picture_of(client, 1), RATE)
        states.append(net.state_dict())
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def run(clients: int, noise: DistributedPrivacy | None, out: Path, iterations: int) -> AuditedSum:
    """Run one round under SecAgg+, and attack its sum."""
    ones = torch.ones(1, 1, 1)
    known = Knowledge(network(), (1, 8, 8), 10, 0 * ones, ones, local_steps=1, learning_rate=RATE)
    name = "none" if noise is None else "distributed-dp"
    auditor = Auditor(known, "ig:tv=0.0001", out, defense=name, iterations=iterations)
    begun = ndarrays_to_parameters([value.numpy() for value in network().state_dict().values()])
    average = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=begun,
        on_fit_config_fn=lambda number: {"server-round": number},
    )
    strategy, server = AuditedSum(average, auditor, truth=partial(pictures_of, clients)), ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        secure = SecAggPlusWorkflow(  # max_weight as large as a client's weight: more would cost precision
            1.0, 0.75, max_weight=1.0, clipping_range=CLIPPING, quantization_range=LEVELS
        )
        DefaultWorkflow(fit_workflow=secure)(grid, LegacyContext(context, ServerConfig(num_rounds=1), strategy))

    mods = [secaggplus_mod] if noise is None else [secaggplus_mod, upload_mod(noise)]
    shares = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, ClientApp(client_of, mods=mods), clients, backend_config={"client_resources": shares})
    if noise is not None and strategy.least is not None:
        auditor.promise(noise.guarantee(1, strategy.least), 1)
    return strategy


def main() -> None:
    """Run with and without noise, and print what the server saw and what came back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--noise", type=float, default=1.0, help="of the sum, in units of a client's largest update")
    parser.add_argument("--out", type=Path, default=Path("runs/secure-sum"))
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    plain = average_plainly(given.clients)
    for noise in (None, DistributedPrivacy(given.noise, NORM, given.clients)):
        out = given.out / ("sum" if noise is None else "noisy")
        strategy = run(given.clients, noise, out, given.iterations)
        far = max(float((strategy.average[name] - value).abs().max()) for name, value in plain.items())
        items = [r.value for r in strategy.auditor.rows if r.metric == "psnr" and r.extra.get("item") is not None]
        text = f"{out.name}: the server saw the sum of {strategy.least} clients, {far:.2e} from the plain average"
        text += f"; PSNR {sum(items) / len(items):.1f} dB, best {max(items):.1f} dB"
        if noise is not None:
            text += f"; {noise.guarantee(1, strategy.least or 1)}"
        print(f"{text}; the page: {out / 'report.html'}", flush=True)
    print(f"a step of the quantisation: {2 * CLIPPING / LEVELS:.2e}", flush=True)


if __name__ == "__main__":
    main()
