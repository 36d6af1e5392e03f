"""The app in Flower's simulation: with whole, pruned and sub-models, with a client that lost its mods, and without all.

    python examples/flower-strategies/simulate.py [--rounds N]

Half a minute on two cores.
"""

from __future__ import annotations

import secateur.federated.flower  # noqa: F401 (first, as it turns off what Flower reports home)

# isort: split
import argparse
import logging
from typing import Any

from digits_app import client_app, server_app
from digits_app.task import CLIENTS
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from secateur.training.ray import connected

CONFIG = {"learning-rate": 0.2, "secateur-defense": "top-k+error-feedback", "keys": ""}


def configure(config: dict[str, Any], forgetful: int | None) -> Mod:
    """A mod that gives clients the run's config, which `flwr run` does elsewhere; one client loses all other mods."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        full = Context(context.run_id, context.node_id, context.node_config, context.state, config)
        if context.node_config["partition-id"] == forgetful:
            return client_app.turn(message, full)
        return call_next(message, full)

    return mod


def simulate(config: dict[str, Any], forgetful: int | None = None, told: bool = True) -> None:
    """One federation of all clients."""
    clients = config if told else {name: value for name, value in config.items() if name != "secateur-defense"}
    server, client = ServerApp(), ClientApp(mods=[configure(clients, forgetful), *client_app.MODS])
    client.train()(client_app.turn)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        server_app.run(grid, config)

    run_simulation(server, client, CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


def main() -> None:
    """Run all of them on one Ray."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    config = CONFIG | {"rounds": parser.parse_args().rounds}
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with connected():
        for model in ("whole", "pruned", "submodels"):
            simulate(config | {"model": model})
        print("client 3 without its mods:")
        simulate(config | {"model": "whole"}, forgetful=3)
        print("no client is told a defense:")
        simulate(config | {"model": "whole"}, told=False)


if __name__ == "__main__":
    main()
