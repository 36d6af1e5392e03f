r"""Many supernodes of Flower in one tree of processes, which imports torch once.

    python -m secateur.federated.flower.nodes 50 --superlink fed.example.org:8000 --root-certificates ca.crt \
        --auth-supernode-private-key 'keys/node-{n}' --node-config 'partition-id={n}'

Flower starts a new process for every message, and importing torch takes most of its time. Here that process is a fork
of this one, which has imported all before. Every message still has a process of its own. All options but `--pause` are
those of flower-supernode, with a node's number for {n}. A node that ended is started again, at first often: Flower
takes a killed node for active for about a minute, and turns it away until then.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.runtime.run_clientapp import run_clientapp

from secateur.config import Federate, read
from secateur.federated.build import load_data
from secateur.federated.flower.link import shorten_pulls

HOST = "127.0.0.1"
AGAIN = 2.0  # seconds before a node that ended is started again, times the starts in a row that failed
TRIES = 12  # such starts, then it is left out
LASTED = 60.0  # seconds of a start that did not fail
IDLE = 1.0  # a supernode that sleeps longer has no message
LOOK = 0.02  # seconds between two looks for a client's answer, inside of the supernode's process
SWEEP = 1.0  # seconds between two questions to supernodes that announce nothing


def preload() -> None:
    """Import what clients need, before any fork: the methods, the data sets, the code of a turn.

    Nothing is trained here: torch cannot take gradients in a fork of a process that took some, nor use a GPU there.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a plain check for GPUs would be such a use
    import_module("secateur.federated.flower.client")
    load_data(read(Federate, None, {}))


class Node:
    """One supernode: its process, and the API by which it hands out messages."""

    def __init__(self, number: int, options: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        self.number, self.address = number, f"{HOST}:{port}"
        inside = ["--isolation", "process", "--host", HOST, "--port", str(port)]
        self.arguments = [*(option.replace("{n}", str(number)) for option in options), *inside]
        self.pid = 0
        self.started = self.ended = 0.0
        self.failed = 0  # starts in a row that ended soon
        self._client: RuntimeHttpClient | None = None

    def start(self, pause: float, sink: int) -> None:
        """Fork the supernode; it asks every `pause` seconds, and writes its number to `sink` if it has a message."""

        def run() -> None:
            shorten_pulls()
            shorten_pauses(pause, lambda: write_number(sink, self.number))
            flower_supernode()

        self.started = time.monotonic()
        self.pid = fork(run, ["flower-supernode", *self.arguments])
        print(f"node {self.number} is process {self.pid}", flush=True)

    def note_end(self) -> bool:
        """Note that the process ended; return True if it is to be started again."""
        self.ended = time.monotonic()
        self.failed = 1 if self.ended - self.started > LASTED else self.failed + 1
        return self.failed < TRIES

    @property
    def is_due(self) -> bool:
        """True if the time has come to start the node again."""
        return time.monotonic() - self.ended > AGAIN * self.failed

    def work(self) -> int | None:
        """Return the process of a new message, if the node has one to be worked on."""
        if self._client is None:
            version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
            self._client = RuntimeHttpClient.from_server_address(
                server_address=self.address, insecure=True, root_certificates=None, interceptors=[version]
            )
        try:
            answer = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except httpx.HTTPError:  # it is starting, or was killed
            return None
        if not answer.HasField("task") or not answer.token:
            return None
        parent = os.getpid()

        def run() -> None:
            shorten_pulls()
            run_clientapp(self.address, answer.token, insecure=True, parent_pid=parent)

        return fork(run, ["flwr-clientapp"])


def fork(function: Callable[[], Any], arguments: list[str]) -> int:
    """Run a function in a fork, as a command with these arguments; return its process."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = arguments
        function()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        os._exit(code)


def shorten_pauses(pause: float, announce: Callable[[], None]) -> None:
    """Let supernodes ask for messages every `pause` seconds, and call `announce` while one waits for its client.

    Flower sleeps 3 seconds between two questions, and .5 between two looks for the client's answer.
    """
    last = 0.0

    def sleep(seconds: float) -> None:
        nonlocal last
        if seconds > IDLE:
            time.sleep(min(seconds, pause))
            return
        if time.monotonic() - last > pause:
            last = time.monotonic()
            announce()
        time.sleep(min(seconds, LOOK))

    others = {name: value for name, value in vars(time).items() if name != "sleep"}
    start_client_internal.time = SimpleNamespace(**others, sleep=sleep)  # type: ignore[attr-defined, assignment]


def serve(nodes: Sequence[Node], pause: float) -> None:
    """Start the nodes and work on their messages, until no node is left."""
    source, sink = os.pipe()  # a node that has a message writes its number
    for node in nodes:
        node.start(pause, sink)
    alive = {node.pid: node for node in nodes}
    gone: list[Node] = []
    swept = 0.0
    while alive or gone:
        announced = read_numbers(source, pause)
        if sweep := time.monotonic() - swept > max(pause, SWEEP):
            swept = time.monotonic()
        for node in list(alive.values()):
            if sweep or node.number in announced:
                node.work()
        for node in [node for node in gone if node.is_due]:
            gone.remove(node)
            node.start(pause, sink)
            alive[node.pid] = node
        while (ended := _reap()) is not None:
            pid, status = ended
            if (node_of := alive.pop(pid, None)) is not None:
                print(f"node {node_of.number} ended ({os.waitstatus_to_exitcode(status)})", flush=True)
                gone += [node_of] if node_of.note_end() else []


def write_number(sink: int, number: int) -> None:
    """Write a node's number into the pipe."""
    os.write(sink, struct.pack("=I", number))


def read_numbers(source: int, pause: float) -> set[int]:
    """Return the numbers that nodes wrote into the pipe; wait for one, at most `pause` seconds."""
    if not select.select([source], [], [], pause)[0]:
        return set()
    return {number for (number,) in struct.iter_unpack("=I", os.read(source, 4096))}


def _reap() -> tuple[int, int] | None:
    """Return a process that ended, and its status."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int, help="number of supernodes")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two questions for messages")
    known, options = parser.parse_known_args(arguments)
    preload()
    nodes = [Node(number, options) for number in range(known.nodes)]

    def end(number: int, _: FrameType | None) -> NoReturn:
        for node in nodes:
            if node.pid:
                os.kill(node.pid, number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    serve(nodes, known.pause)


if __name__ == "__main__":
    main()
