"""What a deployed federation costs: a superlink, the server's app and some supernodes on loopback, with TLS and keys.

The digits network, one local step of batch 8, every client in every round. Every message starts a new process at its
node, so it is Flower's processes that are measured; with `tree` that process is a fork of one that imported torch.
benchmarks/flower.py prints these rows with the others.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
SETTINGS = {"model": "digits-cnn", "local_steps": 1, "batch_size": 8, "evaluate_every": 1000, "learning_rate": 0.1}


class Watch:
    """Sees rounds end, by the checkpoint that a deployed server writes after each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ends = folder, [time.monotonic()]
        self._last = 0

    def done(self) -> bool:
        """Whether the page is written; to be asked often."""
        for file in self.folder.glob("unfinished/*.safetensors"):
            changed = file.stat().st_mtime_ns
            if changed != self._last:
                self._last = changed
                self.ends.append(time.monotonic())
        return (self.folder / "report.html").exists()


def deployed(nodes: int, rounds: int, tree: bool = False) -> dict[str, Any]:
    """Seconds a round, CPU seconds a node and turn, and the memory of the server, with so many supernodes."""
    sys.path.append(str(ROOT / "tests" / "system"))
    from deploying import Deployment, cost, held  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder, Deployment(Path(folder)) as flower:
        flower.superlink()
        flower.superexec()
        names = ["nodes"] if tree else [f"node{i}" for i in range(nodes)]
        if tree:
            flower.nodes(nodes, 0.2 + nodes / 25)  # the superlink answers each question
        for place, name in enumerate(() if tree else names):
            flower.supernode(name, place)
        out = Path(folder) / "run"
        settings = SETTINGS | {"clients": nodes, "per_round": nodes, "rounds": rounds, "deadline": 300.0}
        flower.run(ROOT / "examples" / "flower-app", **settings, out=str(out), patience=600.0)
        watch, begun = Watch(out), time.monotonic()
        server: dict[str, tuple[float, float]] = {}

        def ended() -> bool:
            for name in ("superlink", "superexec"):
                now = cost(flower.processes[name].pid)
                server[name] = max(server.get(name, now)[0], now[0]), max(server.get(name, now)[1], now[1])
            return watch.done()

        flower.wait_for(ended, "the page", 1500)
        whole = time.monotonic() - begun
        client = sum(cost(flower.processes[name].pid)[0] for name in names)
        memory = sum(held(flower.processes[name].pid) for name in names)
    steps = [later - earlier for earlier, later in zip(watch.ends, watch.ends[1:], strict=False)]
    return {
        "engine": "deployed in one tree" if tree else "deployed",
        "clients": nodes,
        "rounds": rounds,
        "whole_seconds": whole,
        "first_round_seconds": steps[0],
        "round_seconds": median(steps[1:] or steps),
        "superlink_MiB": server["superlink"][1],
        "app_MiB": server["superexec"][1],
        "nodes_MiB": memory,  # at the end; pages that processes share count once
        "superlink_cpu_seconds": server["superlink"][0],
        "app_cpu_seconds": server["superexec"][0],
        "client_cpu_seconds_a_message": client / (nodes * (rounds + 1)),  # one greets
    }
