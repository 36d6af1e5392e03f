"""A Ray cluster: one that is there, or one on this machine that ends with the work."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from secateur.errors import WrongInput, require


@contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[Any]:
    """The module `ray`, connected; what was started here is ended, what was there before stays.

    The cluster is the one at `address`, else the one that RAY_ADDRESS names, else one on this machine that hands out
    `cpus` (None: as many as there are).
    """
    require("ray", "ray")
    import ray

    if ray.is_initialized():
        yield ray
        return
    # GPUs of tasks that ask for none stay visible; tells nobody that Ray is used
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _knock(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError) as error:  # nothing that `auto` finds, or another version
            raise WrongInput("address", f"{address} cannot be used: {' '.join(str(error).split())}") from None
    else:  # workers on this machine import from where we do: a user's model may lie in the current folder
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        environment = {"env_vars": variables}
        ray.init(address="local", include_dashboard=False, num_cpus=cpus, runtime_env=environment, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Refuse a host and port where nobody listens: Ray itself would wait for minutes."""
    if address == "auto":
        return  # Ray looks for it on this machine
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise WrongInput("address", f"{address!r} is not readable; give host:port, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        said = f"no Ray cluster answers at {address} ({error}); start one there with: ray start --head"
        raise WrongInput("address", said) from None
