"""A deployed federation in which a client lies, nodes are ended and the superlink is restarted.

SECATEUR_SOAK_ROUNDS=30 makes it shorter.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from deploying import Deployment, cost
from safetensors import safe_open
from test_flower_deployed import kept_model

from secateur.config import Federate, read
from secateur.federated.build import build_spec, load_data
from secateur.federated.sampling import sampler_of
from secateur.runs.folder import load_rows

pytestmark = pytest.mark.system

APP = Path(__file__).with_name("faulty_app")
ROUNDS = int(os.environ.get("SECATEUR_SOAK_ROUNDS", "200"))
NODES, LIES, DEADLINE = 3, 5, 10.0
SETTINGS = {"model": "digits-cnn", "clients": NODES, "per_round": 1, "local_steps": 1, "batch_size": 8}
SETTINGS |= {"defense": "dgp+error-feedback", "learning_rate": 0.1, "evaluate_every": 10, "rounds": ROUNDS}


def finished(folder):
    """The rounds that the server's checkpoint has."""
    for file in folder.glob("unfinished/federate-*.safetensors"):
        try:
            with safe_open(file, "np") as held:
                found = re.search(r'"round": ?(\d+), ?"seed"', str(held.metadata()))
                return int(found[1]) if found else 0
        except (OSError, ValueError):  # it is being replaced
            continue
    return 0


def asked_clients():
    """The client that each round asks, from round 1 on."""
    config = read(Federate, None, SETTINGS)
    data, _ = load_data(config)
    sampler = sampler_of(build_spec(config, data, 0, config.base_pruning[0], config.defense[0]), 0)
    return {number: sampler.clients(number)[0] for number in range(1, ROUNDS + 1)}


def node_process(flower, number):
    """The newest process of a node."""
    return int(re.findall(rf"node {number} is process (\d+)", flower.said("nodes"))[-1])


@pytest.mark.timeout(1800)
def test_many_rounds_outlive_their_faults(tmp_path):
    page, asked = tmp_path / "run" / "report.html", asked_clients()
    # the superlink takes down with it the message of its round: not one of client 1, whose losses are its lies alone
    restart = next(n for n in range(ROUNDS // 2, ROUNDS) if 1 not in (asked[n + 1], asked[n + 2], asked[n + 3]))
    with Deployment(tmp_path) as flower:
        flower.superlink()
        flower.superexec()
        flower.nodes(NODES, 0.2)
        settings = SETTINGS | {"out": str(page.parent), "deadline": DEADLINE, "patience": 300.0}
        flower.run(APP, **settings, stage=str(tmp_path), lies=LIES)
        begun = time.monotonic()

        def reach(number):
            flower.wait_for(lambda: page.exists() or finished(page.parent) >= number, f"round {number}", 900)

        reach(ROUNDS // 4)
        os.kill(node_process(flower, 0), signal.SIGTERM)  # signs off, and comes back
        reach(restart)
        before = cost(flower.processes["superlink"].pid)[0]
        flower.end("superlink")
        flower.superlink()
        reach(ROUNDS * 97 // 100)
        os.kill(node_process(flower, 2), signal.SIGKILL)  # does not sign off: its rounds wait for the deadline
        flower.wait_for(page.exists, "the page", 900)
        spent = {name: cost(process.pid)[0] for name, process in flower.processes.items()}
        spent["superlink"] += before
        starts = [len(re.findall(f"node {node} is process", flower.said("nodes"))) for node in range(NODES)]
    parts = ", ".join(f"{name} {seconds / ROUNDS:.2f}" for name, seconds in spent.items())
    print(f"{ROUNDS} rounds in {time.monotonic() - begun:.0f} s; CPU seconds of a round: {parts}")

    rows = load_rows(page.parent)
    lost = {row.extra["round"]: row.note for row in rows if row.metric == "lost_clients"}
    assert starts[0] >= 2 and starts[1] == 1
    words = ("returned NaN", "returned a wrong shape", "returned an oversized update")
    expected = {n: words[n // LIES % 3] for n in range(LIES, ROUNDS + 1, LIES) if asked[n] == 1}
    assert expected and all(f"client 1 {word}" in lost[number] for number, word in expected.items())
    others = {number: note for number, note in lost.items() if number not in expected}
    assert len(others) <= 12 and all(re.search("client [02]", note) for note in others.values())  # by the two kills
    scores = [row.value for row in rows if row.metric == "test_accuracy"]
    assert len(scores) == ROUNDS // 10 and max(scores[-3:]) > scores[0]
    assert all(value.isfinite().all() for value in kept_model(page.parent).values())
