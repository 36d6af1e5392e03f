"""The two apps of our federations: the client's, the same everywhere, and the server's, of a run configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid, ServerApp

if TYPE_CHECKING:
    from secateur.catalogue import Choice, Defense
    from secateur.config import Federate
    from secateur.federated.federation import Federation
    from secateur.federated.flower.client import Clients
    from secateur.federated.flower.link import Link
    from secateur.federated.flower.submodels import NarrowClients
    from secateur.federated.submodels.federation import SubmodelFederation


def task_of(config: Federate, seed: int, rule: Choice, defense: Defense) -> str:
    """One federation of a run, as a client is told of it; the weights it begins with come with the first message."""
    from secateur.config import dump

    told = {name: value for name, value in dump(config).items() if name != "weights"}
    return json.dumps({"config": told, "seed": seed, "rule": str(rule), "defense": str(defense)}, sort_keys=True)


@lru_cache(maxsize=1)  # the processes of a simulation live through many messages
def clients_of(task: str, own: str, said: str) -> Clients | NarrowClients:
    """The clients' side of a task; `own` is JSON of what the node says of its machine: data_folder, device, own_data.

    `said` is JSON of what the server says of its data, for a node with data of its own.
    """
    from secateur.config import Federate, read
    from secateur.federated.build import loaded, network_of, terms_of
    from secateur.federated.flower.client import Clients
    from secateur.federated.flower.node_data import own_of
    from secateur.interfaces import Batch

    given, machine = json.loads(task), json.loads(own)
    source = machine.pop("own_data", None)
    config = read(Federate, None, given["config"] | machine)
    data, device, shares = (*loaded(config), None) if source is None else own_of(config, source, json.loads(said))
    seed, net = given["seed"], network_of(config, data, given["seed"]).to(device)
    (defense,) = [each for each in config.defense if str(each) == given["defense"]]
    (rule,) = [each for each in config.submodels or config.base_pruning if str(each) == given["rule"]]
    if config.submodels:
        from secateur.federated.flower.submodels import NarrowClients
        from secateur.federated.submodels.spec import terms_of as narrow_terms_of

        return NarrowClients(net, data, narrow_terms_of(config, data, seed, rule, defense), seed, device)
    terms = terms_of(config, data, seed, rule, defense, shares)
    train = Batch(data.inputs[: data.train_size], data.labels[: data.train_size])
    return Clients(net, train, terms, seed, device)


def client_app(mods: list[Mod] | None = None) -> ClientApp:
    """Takes turns; what a client keeps stays in its context.

    Of its node-config it reads partition-id, which client it is, and what is its machine's: data-folder, device, and
    own-data where it trains on that and not on a share of the federation's data set.
    """
    app = ClientApp(mods=mods)
    names = {name: name.replace("-", "_") for name in ("data-folder", "device", "own-data")}

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        given = context.node_config
        told: dict[str, Any] = {"client": int(given.get("partition-id", -1))}
        if "own-data" in given:
            from secateur.federated.flower.node_data import own_data

            folder = str(given["data-folder"]) if "data-folder" in given else None
            told["examples"] = own_data(str(given["own-data"]), folder).train_size
        return Message(RecordDict({"turn": ConfigRecord(told)}), reply_to=message)

    @app.train()
    def turn(message: Message, context: Context) -> Message:
        told = message.content.config_records["turn"]
        own = {names[name]: value for name, value in context.node_config.items() if name in names}
        clients = clients_of(str(told["task"]), json.dumps(own, sort_keys=True), str(told.get("said", "{}")))
        return Message(clients.answer(message.content, context.state), reply_to=message)

    return app


def server_app() -> ServerApp:
    """Runs the federations of its run configuration over whichever nodes there are, and writes rows and a page."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from secateur.experiments.federate import run_federate
        from secateur.federated.flower.link import Link

        given = dict(context.run_config)
        out, patience = Path(str(given.pop("out"))), float(given.pop("patience", 60.0))
        config = config_of(given)
        run_federate(config, out, Link(grid, config.deadline, patience, deployed=True))

    return app


def config_of(given: Mapping[str, Any]) -> Federate:
    """A run configuration as a run file: local-steps is local_steps, faults.nan a part of faults, "" is not given."""
    from secateur.config import Federate, read

    named = {name.replace("-", "_"): value for name, value in given.items() if value != ""}
    plain = {name: value for name, value in named.items() if "." not in name}
    parts = [f"{name}={value}" for name, value in named.items() if "." in name]
    return read(Federate, None, plain | {"engine": "flower"}, parts)


def over(link: Link, config: Federate, seed: int, base: Choice, defense: Defense) -> Callable[..., Federation]:
    """Makes a federation as `Federation(...)` does, whose clients are at the other end of a link."""
    from secateur.federated.flower.federation import FlowerFederation

    return partial(FlowerFederation, link, task_of(config, seed, base, defense))


def submodels_over(
    link: Link, config: Federate, seed: int, rule: Choice, defense: Defense
) -> Callable[..., SubmodelFederation]:
    """The same of a federation over sub-models."""
    from secateur.federated.flower.submodels import FlowerSubmodels

    return partial(FlowerSubmodels, link, task_of(config, seed, rule, defense))
