"""What Ray is told when a cluster is started or joined: a token, no usage statistics."""

import importlib.machinery
import os
import signal
import socket
import sys
import types

import pytest

from secateur.errors import WrongInput
from secateur.training.ray import connected, require_token


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray that keeps the environment of its start."""
    stand_in = types.ModuleType("ray")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("ray", None)
    stand_in.started = []
    stand_in.is_initialized = lambda: False
    stand_in.shutdown = lambda: None
    stand_in.init = lambda **options: stand_in.started.append((options, dict(os.environ)))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return stand_in


def test_a_cluster_of_ours_has_a_new_token_and_reports_nothing_home(ray, monkeypatch):
    require_token()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with connected(cpus=1):
        pass
    ((options, environment),) = ray.started
    assert options["address"] == "local" and not options["include_dashboard"]
    assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"


def test_the_handler_of_sigterm_stays_ours(ray, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ray)
    ray.init = lambda **_: signal.signal(signal.SIGTERM, lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    with connected(cpus=1):
        assert signal.getsignal(signal.SIGTERM) is before


def test_settings_of_the_user_stay(ray, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    require_token()
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"


def test_a_cluster_that_refuses_says_what_it_needs(ray, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ray)

    def refuse(**_):
        raise ConnectionError("unauthenticated")

    ray.init = refuse
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(WrongInput, match="needs RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN"), connected(address):
            pass
