"""A run of somebody else's Flower app in the simulation: the messages that its server sees, and its clients' trainings.

The grid between the app's server and its clients is ours. It counts bytes, reads the accuracy that clients report, and
orders probes in the attacked rounds (probe.py). So any strategy can be audited.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from secateur.errors import WrongInput, require
from secateur.federated.flower.app_turn import AppTurn
from secateur.federated.flower.link import PAUSE, size_of, tensors_of
from secateur.federated.flower.mod import decode_reply, round_of
from secateur.federated.flower.probe import ORDER, ProbedApp, set_seed
from secateur.federated.flower.project import AppProject
from secateur.interfaces import Upload
from secateur.seeding import derive, draw_seed
from secateur.training.ray import connected, require_token

POLLS = 60  # questions for nodes, a second or more each, after which no more nodes will come
EXAMPLES = ("num-examples", "num_examples")  # a client's weight in an average


@dataclass
class AppRound:
    """A round as the server of the app sees it."""

    up: int = 0  # bytes of arrays
    down: int = 0
    arrived: int = 0  # updates
    errors: list[str] = field(default_factory=list)  # of clients
    accuracies: list[tuple[float, float]] = field(default_factory=list)  # reported by clients, with their examples
    central: float | None = None  # the accuracy that the server measures, if it does

    @property
    def accuracy(self) -> float | None:
        """The accuracy that the server measures, or the mean of those that clients report, by their examples."""
        if self.central is not None:
            return self.central
        weight = sum(examples for _, examples in self.accuracies)
        return sum(value * examples for value, examples in self.accuracies) / weight if weight else None


@dataclass
class AppRun:
    """The rounds of an app, and the turns of its attacked clients."""

    rounds: dict[int, AppRound] = field(default_factory=dict)
    turns: list[AppTurn] = field(default_factory=list)

    def round(self, number: int) -> AppRound:
        """Return the record of a round."""
        return self.rounds.setdefault(number, AppRound())


class ObservedGrid(Grid):
    """A grid that passes all messages on, and keeps a record of them."""

    def __init__(
        self,
        inner: Grid,
        clients: Collection[int],
        attacked: Collection[int],
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self.inner, self.clients, self.attacked, self.folder, self.tell = inner, clients, attacked, folder, tell
        self.result = AppRun()
        self.stopped = False  # set from outside: all waiting ends
        self._asked: dict[str, tuple[int, Message, Path | None]] = {}  # by message: its round, and the probe's file
        self._last = 0  # round
        self._polls = 0  # questions for nodes before the first message

    def set_run(self, run: Any) -> None:
        """Delegate to the inner grid."""
        self.inner.set_run(run)

    @property
    def run(self) -> Any:
        """The run of the inner grid."""
        return self.inner.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Delegate to the inner grid."""
        return self.inner.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes; refuse a server that goes on asking, because it waits for more of them."""
        nodes = list(self.inner.get_node_ids())
        self._polls += 1
        if self.stopped:
            raise KeyboardInterrupt
        if self._polls > POLLS:
            raise WrongInput("clients", f"the app's server waits for more than {len(nodes)} clients; use more")
        return nodes

    def get_nodes(self) -> Any:
        """Delegate to the inner grid."""
        return self.inner.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Count messages, order probes in attacked rounds, and pass them on."""
        messages, self._polls = list(messages), -sys.maxsize
        if any(map(_trains, messages)):
            number = max(map(round_of, messages)) or self._last + 1
            if number != self._last:
                self.tell(f"round {number}")
            self._last = number
        orders = [self._order(message) for message in messages]
        idents = []
        for message, file in zip(messages, orders, strict=True):
            for ident in self.inner.push_messages([message]):
                self._asked[ident] = self._last, message, file
                idents.append(ident)
        return idents

    def _order(self, message: Message) -> Path | None:
        """Count the bytes of a message; add the order of a probe to one of an attacked round, and return its file."""
        if not _trains(message):
            return None
        self.result.round(self._last).down += sum(map(size_of, message.content.array_records.values()))
        if self._last not in self.attacked:
            return None
        file = self.folder / f"{self._last}-{message.metadata.dst_node_id}.pt"
        order = ConfigRecord({"file": str(file), "clients": list(self.clients)})
        message.content = RecordDict({**message.content, ORDER: order})  # the content may be that of all clients
        return file

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that arrived, after they were counted and decoded."""
        if self.stopped:
            raise KeyboardInterrupt
        replies = list(self.inner.pull_messages(message_ids))
        for reply in replies:
            if (asked := self._asked.pop(reply.metadata.reply_to_message_id, None)) is not None:
                self._note(reply, *asked)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Pass messages on, and return the replies that arrive before the timeout."""
        waiting, replies = set(self.push_messages(messages)), []
        end = None if timeout is None else time.monotonic() + timeout
        while waiting and (end is None or time.monotonic() < end):
            arrived = list(self.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
            time.sleep(0 if arrived else PAUSE)
        return replies

    def _note(self, reply: Message, number: int, asked: Message, file: Path | None) -> None:
        """Record a reply to a message of a round."""
        record = self.result.round(number)
        if reply.has_error():
            record.errors.append(str(reply.error.reason))
            return
        if not _trains(asked):
            records: list[Any] = [*reply.content.config_records.values(), *reply.content.metric_records.values()]
            record.accuracies += _list_accuracies(records)
            return
        record.arrived += 1
        sent = tensors_of(_largest_record(asked.content)[1])
        record.up += sum(map(size_of, reply.content.array_records.values()))
        decode_reply(reply, sent, asked.content)
        if file is not None and file.exists():
            training = torch.load(file, "cpu", weights_only=False)  # of our own client, in our own folder
            self.result.turns.append(AppTurn(number, sent, tensors_of(_largest_record(reply.content)[1]), training))
            file.unlink()


def _trains(message: Message) -> bool:
    """Return True if a message asks a client to train."""
    return message.metadata.message_type.split(".")[0] == MessageType.TRAIN


def _largest_record(content: RecordDict) -> tuple[str, ArrayRecord]:
    """Return the record of arrays with the most bytes, which is the model."""
    if not content.array_records:
        raise WrongInput("app", "its messages hold no arrays, so there is no model to audit")
    return max(content.array_records.items(), key=lambda item: size_of(item[1]))


def _list_accuracies(records: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the reported accuracy, with its number of examples; none if no name says accuracy."""
    values = {name: value for record in records for name, value in record.items()}
    weights = [float(values[name]) for name in EXAMPLES if name in values]
    named = [value for name, value in values.items() if "acc" in name.lower() and isinstance(value, int | float)]
    return [(float(named[0]), weights[0] if weights else 1.0)] if named else []


@contextmanager
def _results_noted(results: list[Any]) -> Iterator[None]:
    """Note the results of strategies, which an app's server keeps to itself: they hold its own evaluations."""
    start = Strategy.start

    def start_and_note(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
        result = start(strategy, *args, **kwargs)
        results.append(result)
        return result

    Strategy.start = start_and_note  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Strategy.start = start  # type: ignore[method-assign]


def run_app(
    project: AppProject,
    nodes: int,
    upload: Upload | None,
    seed: int,
    clients: Collection[int],
    attacked: Collection[int],
    tell: Callable[[str], None],
) -> AppRun:
    """Run an app in Flower's simulation, and return its record.

    Args:
        project: the app.
        nodes: the number of simulated clients.
        upload: a defense of every update; None: the app as it is.
        seed: of the global generators that the app draws from.
        clients: the clients whose updates are kept in attacked rounds.
        attacked: these rounds.
        tell: is called with the progress in words.
    """
    require("ray", "flower")
    require_token()  # before Flower imports Ray
    from flwr.simulation import run_simulation

    server, client = project.load_server(), ProbedApp(project, upload, seed)
    project.load_client()  # refuses now what would fail in every process of the simulation
    app = ServerApp()
    grids: list[ObservedGrid] = []
    errors: list[BaseException] = []
    results: list[Any] = []  # of strategies
    with tempfile.TemporaryDirectory(prefix="secateur-") as folder:

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            grids.append(ObservedGrid(grid, clients, attacked, Path(folder), tell))
            context.run_config = dict(project.config)
            set_seed(draw_seed(derive(seed, "server"), 2**32))
            try:
                with _results_noted(results):
                    server(grids[0], context)
            except (Exception, KeyboardInterrupt) as error:
                errors.append(error)

        _simulate(lambda: run_simulation(app, client, nodes, backend_config=BACKEND), grids)
    seen = _check_run(grids[0].result if grids else AppRun(), errors)
    for number, metrics in (item for result in results for item in result.evaluate_metrics_serverapp.items()):
        if number in seen.rounds and (reported := _list_accuracies([metrics])):
            seen.rounds[number].central = reported[0][0]
    return seen


BACKEND: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


def _simulate(work: Callable[[], None], grids: list[ObservedGrid]) -> None:
    """Run a simulation with Flower's logs off, and what the app prints on standard error."""
    logs = logging.getLogger("flwr")
    level = logs.level
    logs.setLevel(logging.CRITICAL)
    try:
        with connected(), redirect_stdout(sys.stderr):  # Flower uses a Ray that is there
            work()
    except KeyboardInterrupt:
        for grid in grids:
            grid.stopped = True
        raise
    finally:
        logs.setLevel(level)


def _check_run(result: AppRun, errors: list[BaseException]) -> AppRun:
    """Return a run that gave something to audit; refuse one whose app failed, with the app's own words."""
    lost = [reason for record in result.rounds.values() for reason in record.errors]
    said = f"; a client said: {lost[0][:500]}" if lost else ""
    if errors:
        if isinstance(errors[0], WrongInput):
            raise errors[0]
        problem = f"its server raised {type(errors[0]).__name__}: {errors[0]}"
        raise WrongInput("app", f"{problem}{said}; run it by `flwr run` first") from errors[0]
    if not any(record.arrived for record in result.rounds.values()):
        raise WrongInput("app", f"no update arrived{said or '; its server asked no client to train'}")
    return result
