"""Connection to a Ray cluster: an existing one, or one on this machine that ends with the work."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from secateur.errors import WrongInput, require

log = logging.getLogger(__name__)

ADVICE = "a cluster with a token needs RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here too"


@contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[Any]:
    """Yield the module `ray`, connected; a connection that was opened here is closed, an existing one stays.

    The cluster is the one at `address`, else the one that RAY_ADDRESS names, else a new one on this machine with `cpus`
    CPUs (None: all).
    """
    require("ray", "ray")
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        require_token()
    import ray

    if ray.is_initialized():
        yield ray
        return
    # GPUs stay visible to tasks that request none; no usage statistics are sent
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        _check_reachable(address)
        try:
            with _kept_handler():
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError) as error:  # `auto` finds no cluster, or another version
            problem = f"{address} cannot be used: {' '.join(str(error).split())}"
            raise WrongInput("address", f"{problem}; {ADVICE}") from None
    else:  # workers on this machine use our import path: a user's model may be in the current folder
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        environment = {"env_vars": variables}
        with _kept_handler():
            ray.init(address="local", include_dashboard=False, num_cpus=cpus, runtime_env=environment, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _kept_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM: Ray's own ends the process at once, with locks held and nothing said."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    with suppress(ValueError):  # only the main thread may; Ray sets none elsewhere
        signal.signal(signal.SIGTERM, before)


def require_token() -> None:
    """Let a cluster that this process starts answer only to holders of a random token.

    Ray listens on all interfaces, and any other user who reaches its port could run code in the cluster. A user's own
    settings of Ray's authentication stay. Ray reads them when it is imported, so this comes first.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    if "ray" in sys.modules:
        log.warning("starting Ray without a token: it was imported before; set RAY_AUTH_MODE=token first")
    else:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def _check_reachable(address: str) -> None:
    """Refuse a host and port where nothing listens; Ray itself would wait for minutes."""
    if address == "auto":
        return  # Ray searches for a cluster on this machine
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise WrongInput("address", f"{address!r} is not readable; use host:port, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        problem = f"no Ray cluster answers at {address} ({error}); start one there with: ray start --head"
        raise WrongInput("address", problem) from None
