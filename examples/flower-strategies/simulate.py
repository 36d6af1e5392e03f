"""The app in Flower's simulation: pruned and sub-models, a client that lost its mods, and a run without a defense.

    python examples/flower-strategies/simulate.py [--rounds N]

Half a minute on two cores.
"""

from __future__ import annotations

import secateur.federated.flower  # noqa: F401 (first, as it turns off what Flower reports home)

# isort: split
import argparse
import json
import logging
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from digits_app import client_app, server_app
from digits_app.task import CLIENTS

CONFIG = {"learning-rate": 0.2, "secateur-defense": "top-k+error-feedback", "keys": "", "forgetful": -1}
RUNS: dict[str, dict[str, Any]] = {
    "half of the weights": {"model": "pruned"},
    "half of the channels for three of four clients": {"model": "submodels"},
    "client 3 lost its mods": {"model": "whole", "forgetful": 3},
    "the run's config lacks the defense": {"model": "whole", "secateur-defense": ""},
}


def configure(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Give a client the config and the state of its run: here one simulation holds many runs, which saves minutes."""
    name, config = str(message.content["config"]["run"]), json.loads(str(message.content["config"]["run-config"]))
    records = {key: record for key, record in context.state.items() if key.startswith(name)}
    state = RecordDict({key.removeprefix(name): record for key, record in records.items()})
    own = Context(context.run_id, context.node_id, context.node_config, state, config)
    if context.node_config["partition-id"] == config["forgetful"]:
        return client_app.turn(message, own)
    reply = call_next(message, own)
    for key, record in state.items():
        context.state[name + key] = record
    return reply


def main() -> None:
    """Run all of them, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server, client = ServerApp(), ClientApp(mods=[configure, *client_app.MODS])
    client.train()(client_app.turn)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        for name, changes in RUNS.items():
            print(f"{name}:", flush=True)
            config = CONFIG | changes | {"rounds": rounds}
            messages = ConfigRecord({"run": name, "run-config": json.dumps(config)})
            agreed = config | {"secateur-defense": CONFIG["secateur-defense"]}
            server_app.run(grid, agreed, messages)

    run_simulation(server, client, CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


if __name__ == "__main__":
    main()
