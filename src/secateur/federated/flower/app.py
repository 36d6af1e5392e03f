"""The two Flower apps of a federation, and its simulation: the client app serves all runs, the server app one run."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import thread as pools
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid, ServerApp

from secateur.errors import require
from secateur.training.ray import connected, require_token

if TYPE_CHECKING:
    from secateur.catalogue import Choice, Defense
    from secateur.config import Federate
    from secateur.federated.flower.client import Clients
    from secateur.federated.flower.federation import NarrowClients
    from secateur.federated.flower.link import Link

CODE = {"transform"}  # fields that name code
REFUSED = CODE | {"data_folder", "weights", "download"}  # fields of a task that a node takes from its own settings
PATIENCE = 5.0  # seconds for the turns of clients that are under way when a simulation is interrupted
T = TypeVar("T")


def task_of(config: Federate, seed: int, rule: Choice, defense: Defense) -> str:
    """Return the JSON that describes one federation of a run to a client; the first message brings initial weights."""
    from secateur.config import dump

    fields = {name: value for name, value in dump(config).items() if name != "weights"}
    return json.dumps({"config": fields, "seed": seed, "rule": str(rule), "defense": str(defense)}, sort_keys=True)


@lru_cache(maxsize=1)  # a process of a simulation handles many messages
def clients_of(task: str, node_config: str, said: str, trusted: bool = False) -> Clients | NarrowClients:
    """Return the clients' side of a task.

    Args:
        task: JSON of one federation (`task_of`).
        node_config: JSON of the node's machine: data_folder, device, own_data, models.
        said: JSON of the server's data (`describe_data`), for a node with its own data.
        trusted: True if the server is this user's own, as in a simulation; else the task is restricted.
    """
    from secateur.config import Federate, list_code, read
    from secateur.errors import WrongInput
    from secateur.federated.build import build_spec, load_data, network_of
    from secateur.federated.flower.client import Clients, load_node
    from secateur.interfaces import Batch

    description, machine = read_task(task), json.loads(node_config)
    source, models = machine.pop("own_data", None), str(machine.pop("models", "")).split(",")
    fields = description["config"] if trusted else restrict_task(description["config"], models, source is not None)
    config = read(Federate, None, fields | machine)
    for field, name in () if trusted else list_code(config).items():
        if name not in models:
            raise WrongInput(field, f"{name!r} is refused: a server may not name code of this node")
    local = None if source is None else load_node(config, source, said)
    data, device, shares = local or (*load_data(config), None)
    seed, net = description["seed"], network_of(config, data, description["seed"]).to(device)
    defense = pick("defense", config.defense, description["defense"])
    rule = pick("rule", config.submodels or config.base_pruning, description["rule"])
    if config.submodels:
        from secateur.federated.build import build_submodel_spec
        from secateur.federated.flower.federation import NarrowClients

        return NarrowClients(net, data, build_submodel_spec(config, data, seed, rule, defense), seed, device)
    terms = build_spec(config, data, seed, rule, defense, shares)
    train = Batch(data.inputs[: data.train_size], data.labels[: data.train_size])
    return Clients(net, train, terms, seed, device)


def read_task(task: str) -> dict[str, Any]:
    """Return a server's task, as `task_of` wrote it; refuse one of another form."""
    from secateur.errors import WrongInput

    kinds = {"config": dict, "seed": int, "rule": str, "defense": str}
    try:
        description = json.loads(task)
    except (ValueError, RecursionError):
        description = None
    if isinstance(description, dict) and all(isinstance(description.get(name), kind) for name, kind in kinds.items()):
        return description
    raise WrongInput("task", f"is refused: it must be a JSON object with {', '.join(kinds)}")


def pick(field: str, choices: Collection[T], name: str) -> T:
    """Return the choice of this name."""
    from secateur.errors import unknown

    for choice in choices:
        if str(choice) == name:
            return choice
    raise unknown(field, name, map(str, choices))


def restrict_task(fields: Mapping[str, Any], models: Collection[str], has_data: bool) -> dict[str, Any]:
    """Return the fields of a server's task that a node obeys; refuse code and data that the server names.

    A message must not run code on a node, and must not read the node's files. So a model is one of the catalogue, or
    one of the `models` that the node's operator names. Data comes from the catalogue, out of the node's own folder.

    Args:
        fields: The run file that the server sent.
        models: Models that the node's operator allows, such as my_models:net.
        has_data: True if the node trains on its own data.
    """
    from secateur.catalogue import methods
    from secateur.config import Federate
    from secateur.errors import WrongInput

    if not isinstance(fields, Mapping) or not str(fields.get("threads", 1)).isdigit():
        raise WrongInput("task", "is refused: it must hold the fields of a run file, and threads as a whole number")
    safe = {name: value for name, value in fields.items() if name not in REFUSED}
    for name in REFUSED & fields.keys():
        if name in CODE and fields[name] != Federate.model_fields[name].get_default(call_default_factory=True):
            raise WrongInput(name, f"{fields[name]!r} is refused: a server may not name code or files of this node")
    model, data = str(fields.get("model")), str(fields.get("data"))
    if model not in methods("model") and model not in models:
        advice = "name it in this node's --node-config as models, if you trust it"
        raise WrongInput("model", f"{model!r} is refused: it is none of the catalogue's; {advice}")
    if not has_data and data not in methods("dataset"):
        advice = "use own-data in this node's --node-config"
        raise WrongInput("data", f"{data!r} is refused: it is none of the catalogue's; {advice}")
    threads = min(int(fields.get("threads", 1)), os.cpu_count() or 1)
    return safe | {"data": "digits" if has_data else data, "download": False, "threads": threads}


def client_app(mods: list[Mod] | None = None, trusted: bool = False) -> ClientApp:
    """Return the app that runs clients' turns; a client's state stays in its context.

    The app reads these fields of the node-config: partition-id (the client's number), data-folder, device, own-data,
    and models. With own-data the client trains on that data instead of a share of the federation's data set. `models`
    are the operator's own networks that a server may ask for, such as my_models:net. A `trusted` server may ask for
    any model and data: a simulation's server is the user.
    """
    app = ClientApp(mods=mods)
    names = {name: name.replace("-", "_") for name in ("data-folder", "device", "own-data", "models")}

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        node = context.node_config
        greeting: dict[str, Any] = {"client": int(node.get("partition-id", -1))}
        if "own-data" in node:
            from secateur.federated.flower.client import load_own_data

            folder = str(node["data-folder"]) if "data-folder" in node else None
            greeting["examples"] = load_own_data(str(node["own-data"]), folder).train_size
        return Message(RecordDict({"turn": ConfigRecord(greeting)}), reply_to=message)

    @app.train()
    def turn(message: Message, context: Context) -> Message:
        from secateur.federated.flower.link import INLINE, inline, restore

        request = message.content.config_records["turn"]
        machine = {names[name]: value for name, value in context.node_config.items() if name in names}
        settings = json.dumps(machine, sort_keys=True)
        clients = clients_of(str(request["task"]), settings, str(request.get("said", "{}")), trusted)
        answer = clients.answer(restore(message.content), context.state)
        return Message(inline(answer) if INLINE in message.content else answer, reply_to=message)

    return app


def server_app() -> ServerApp:
    """Return the app that runs the federations of its run configuration on connected nodes, and writes the results."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from secateur.experiments.federate import run_federate
        from secateur.federated.flower.link import Link

        run_config = dict(context.run_config)
        out, patience = Path(str(run_config.pop("out"))), float(run_config.pop("patience", 60.0))
        config = config_of(run_config)
        run_federate(config, out, Link(grid, config.deadline, patience, deployed=True))

    return app


def config_of(run_config: Mapping[str, Any]) -> Federate:
    """Convert a run configuration: local-steps becomes local_steps, faults.nan a part of faults, "" is absent."""
    from secateur.config import Federate, read

    named = {name.replace("-", "_"): value for name, value in run_config.items() if value != ""}
    plain = {name: value for name, value in named.items() if "." not in name}
    parts = [f"{name}={value}" for name, value in named.items() if "." in name]
    return read(Federate, None, plain | {"engine": "flower"}, parts)


def engine_over(link: Link, config: Federate, seed: int, rule: Choice, defense: Defense) -> Callable[..., Any]:
    """Return a constructor as that of `Federation` or `SubmodelFederation`, for clients behind a link."""
    from secateur.federated.flower.federation import FlowerFederation, FlowerSubmodels

    return partial(
        FlowerSubmodels if config.submodels else FlowerFederation, link, task_of(config, seed, rule, defense)
    )


def simulate(work: Callable[[Link], T], clients: int, deadline: float, gpu: bool = False) -> T:
    """Return the result of `work` with a link to `clients` virtual nodes, in Flower's simulation.

    Ray spreads the clients' turns over the cores; on a GPU all cores share the GPU.
    """
    require("ray", "flower")
    require_token()  # before Flower imports Ray
    from flwr.simulation import run_simulation

    from secateur.federated.flower.link import Link
    from secateur.federated.flower.link_state import indexed_state

    app, results = ServerApp(), []
    links: list[Link] = []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        links.append(Link(grid, deadline))
        with suppress(KeyboardInterrupt):  # the main thread handles it, and stops this thread by the link
            results.append(work(links[0]))

    cores = os.cpu_count() or 1
    shares: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 / cores if gpu else 0.0}
    logs = logging.getLogger("flwr")
    level, before = logs.level, threading.enumerate()
    logs.setLevel(logging.ERROR)
    try:
        with connected(), indexed_state():  # Flower uses a Ray that is there
            try:
                run_simulation(app, client_app(trusted=True), clients, backend_config={"client_resources": shares})
            except KeyboardInterrupt:
                for link in links:
                    link.stopped = True
                _leave_threads(before)
                raise
    finally:
        logs.setLevel(level)
    return results[0]


def _leave_threads(before: Collection[threading.Thread]) -> None:
    """Wait at most `PATIENCE` for the threads that were started since; let the interpreter end without the others.

    Flower ends its actors first, and a thread that waits for an answer of an ended actor waits forever.
    """
    until = time.monotonic() + PATIENCE
    for thread in threading.enumerate():
        if thread not in before and not thread.daemon:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                getattr(pools, "_threads_queues", {}).pop(thread, None)
                getattr(threading, "_shutdown_locks", set()).discard(getattr(thread, "_tstate_lock", None))
