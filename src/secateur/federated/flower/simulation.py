"""Federations in Flower's simulation: every client is a virtual node, and Ray spreads the turns over the cores."""

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
    """Return the result of `work` with a link to `clients` virtual nodes; on a GPU all cores share the GPU."""
    require("ray", "flower")
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
    level = logs.level
    logs.setLevel(logging.ERROR)
    try:
        run_simulation(app, client_app(), clients, backend_config={"client_resources": shares})
    except KeyboardInterrupt:
        for link in links:
            link.stopped = True
        raise
    finally:
        logs.setLevel(level)
    return results[0]
