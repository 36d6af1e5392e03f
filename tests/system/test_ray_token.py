"""Local Ray clusters answer to their owner alone: another process on the machine, without the token, is refused."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system
STRANGER = """
import ray
try:
    ray.init(address={address!r}, log_to_driver=False)
    print("ran", ray.get(ray.remote(lambda: 1).remote()))
except (ConnectionError, RuntimeError) as error:
    print("refused")
"""


def strange_answer(address):
    """Return the words of a process that knows the address and has no token."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    command = [sys.executable, "-c", STRANGER.format(address=address)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False).stdout


SWEEP = """
from secateur.training.ray import connected

with connected(cpus=1) as ray:
    assert ray.get(ray.remote(lambda: 3).remote()) == 3
    print("address", ray.get_runtime_context().gcs_address, flush=True)
    input()
"""
SIMULATION = """
from secateur.federated.flower.app import simulate

def work(link):
    import ray, time
    while not ray.is_initialized():
        time.sleep(0.1)
    print("address", ray.get_runtime_context().gcs_address, flush=True)
    input()

simulate(work, clients=1, deadline=10)
"""


@pytest.mark.parametrize(("package", "script"), [("ray", SWEEP), ("flwr", SIMULATION)])
def test_a_stranger_cannot_use_a_cluster_of_ours(package, script):
    pytest.importorskip(package)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=variables, **pipes) as owner:
        line = next((line for line in owner.stdout if line.startswith("address")), None)
        try:
            assert line is not None
            assert strange_answer(line.split()[1]).strip() == "refused"
        finally:
            owner.communicate("\n", timeout=120)
    assert owner.returncode == 0
