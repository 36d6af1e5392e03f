"""Federations in Flower's simulation: every client is a virtual node, whose turns Ray spreads over the cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from secateur.errors import require
from secateur.federated.flower.app import client_app
from secateur.federated.flower.link import Link

T = TypeVar("T")


def simulated(work: Callable[[Link], T], clients: int, deadline: float, gpu: bool = False) -> T:
    """What `work` makes with a link to so many virtual nodes; on a GPU all cores share it."""
    require("ray", "flower")
    app, found = ServerApp(), []
    links: list[Link] = []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        links.append(Link(grid, deadline))
        with suppress(KeyboardInterrupt):  # it is the main thread's, which tells this one by the link
            found.append(work(links[0]))

    cores = os.cpu_count() or 1
    shares: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 / cores if gpu else 0.0}
    logs = logging.getLogger("flwr")
    before = logs.level
    logs.setLevel(logging.ERROR)
    try:
        run_simulation(app, client_app(), clients, backend_config={"client_resources": shares})
    except KeyboardInterrupt:
        for link in links:
            link.stopped = True
        raise
    finally:
        logs.setLevel(before)
    return found[0]
