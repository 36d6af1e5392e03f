"""Collaborative SGD: N users send gradients through an upload defense, and a server averages them (dgp Algorithm 2).

In each step every user computes its gradient at the shared model, on the next batch of its rows. The server averages
the sent gradients and takes one step of SGD with momentum and weight decay. An epoch is one pass over the largest
share; a user with fewer batches starts its share again.

BatchNorm normalises by each user's batch. The users send their updated running statistics unchanged beside the
gradients, and the server averages them. Some uploads (dp) compute the gradient again, with the running statistics.
Under these the statistics stay constant, because no epsilon would cover them.

ADGP trusts one user a round: the sampled user broadcasts positions, and all users send only inside them. No other user
can check the positions (defenses/adgp.py explains the effect of a lie). `Plan.liar` replaces them by a lie.

On a CPU the users run one by one. On a GPU a step is one CUDA graph; its batches, noise and augmentation are drawn
outside of the graph. Each user has its own backward pass in a parallel branch of the graph. After the backward passes
the users are one axis (uploads.py). Uploads that no graph can capture (defenses/uploads.py) run eagerly, one by one,
after captured gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.defenses.uploads import SendAll, find_aligned, inner_of
from secateur.errors import WrongInput
from secateur.federated.checkpoint import training_key
from secateur.federated.collaborative.measurements import Row
from secateur.federated.collaborative.plan import Plan, Schedule, schedule_of
from secateur.federated.collaborative.rounds import BatchStream, CollaborativeRounds
from secateur.federated.spec import name_function
from secateur.functional import Functional, join_state
from secateur.inference import outputs, to_channels_last
from secateur.interfaces import Mask, Params, Upload
from secateur.models.create import check
from secateur.progress import progress
from secateur.runs.artifacts import Result, decode, encode, explained, key_of, write
from secateur.runs.folder import Run
from secateur.runs.unfinished import forget
from secateur.seeding import derive

STAGE = "collaborate"
EVERY = 30.0  # seconds between two checkpoints
SHARE = 0.03  # of the time for checkpoints: with the residuals of ten ResNet18s, one checkpoint takes seconds
TIMES = ("seconds",)  # columns of a row that differ from run to run


@dataclass(frozen=True, eq=False)
class Epoch:
    """The result of an epoch."""

    row: Row
    sent: Sequence[Params]  # every user's update in the last step; valid until the next epoch starts
    inside: Mask | None = None  # the positions broadcast in that step (adgp)


Measure = Callable[[Epoch], Row]  # further columns of an epoch's row, e.g. the bytes that its last step sent


@dataclass(frozen=True, eq=False)
class CollaborativeResult:
    """The result of a collaborative training."""

    state: Params  # a full state_dict
    history: list[Row]
    client: Params  # the first user's final state: its residual
    description: dict[str, Any]  # the plan and its formal guarantee, for readers of the result


class CollaborativeTraining:
    """A collaborative training that runs epoch by epoch, and can be saved and resumed between two epochs."""

    def __init__(
        self, net: nn.Module, data: Dataset, plan: Plan, rng: Generator, device: torch.device | str = "cpu"
    ) -> None:
        check(net, data.input_shape, data.classes)
        if not tree.list_trained(net):
            raise WrongInput("model", "trains no parameter; leave requires_grad on for those that users train")
        self.net, self.data, self.plan, self.device = net, data, plan, torch.device(device)
        self.seed = int(torch.randint(2**62, (), generator=rng.clone_state()))
        self.rounds = CollaborativeRounds(net, plan, tree.state_of(net), self.device)
        self.judge = Functional(net, training=False, device=self.device)
        self.feed = BatchStream(net, data, plan, self.seed, self.device)
        self.description = plan.description | self._guarantee()
        self.epoch = 0  # finished epochs

    def epochs(self, advance: Callable[[int], None] | None = None) -> Iterator[Epoch]:
        """Train the remaining epochs of the schedule and yield each; `advance` is called with 1 after every step."""
        while self.epoch < self.plan.schedule.epochs:
            yield self._train(self.epoch + 1, advance)

    def model(self) -> Params:
        """Return the current shared model: a state_dict of copies."""
        return join_state(self.net, self.rounds.params | self.rounds.buffers)

    def state(self) -> Params:
        """Return everything that the next epoch depends on, for `load`; random draws need only seed and epoch."""
        parts = {f"{part}.{name}": value for part, values in self._parts().items() for name, value in values.items()}
        return parts | {name: torch.tensor(value) for name, value in self._numbers().items()}

    def load(self, state: Params) -> None:
        """Resume from the output of `state`, in a training of the same plan, data and seed."""
        wanted = {f"{part}.{name}": value for part, values in self._parts().items() for name, value in values.items()}
        if {*state} != {*wanted, *self._numbers()} or int(state["seed"]) != self.seed:
            raise WrongInput("state", "is of another training; must be one of this plan and seed")
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(state[name])
        self.epoch, self.rounds.number = int(state["epoch"]), int(state["round"])

    def _train(self, epoch: int, advance: Callable[[int], None] | None) -> Epoch:
        started, rate = time.perf_counter(), self.plan.schedule.rate(epoch)
        examples = steps = 0
        for step_inputs in self.feed(epoch, self.rounds):
            exchanged = self.rounds(step_inputs)
            examples += sum(user.batch.size for user in step_inputs.users)
            steps += 1
            if advance is not None:
                advance(1)
        tally, broadcasts = self.rounds.tally, find_aligned(self.plan.upload) is not None
        row = {"epoch": epoch, "learning_rate": rate} | tally.row(examples, steps, self.rounds.states, broadcasts)
        row["seconds"] = time.perf_counter() - started
        row |= self._evaluate(epoch)
        if not math.isfinite(row["train_loss"]):
            raise WrongInput("model", f"the loss became NaN in epoch {epoch}; lower the learning rate, check the data")
        self.epoch = epoch
        return Epoch(row, exchanged.sent, exchanged.inside)

    def _evaluate(self, epoch: int) -> Row:
        """Return loss and accuracy on the test part, if there is one; noise inside the network is drawn here too."""
        inputs, labels = self.feed.test
        if not len(labels):
            return {}
        seed = int(torch.randint(2**62, (), generator=derive(self.seed, "judge", epoch)))
        noise = Generator(self.device).manual_seed(seed)

        def answer(tensors: Params, chunk: Tensor) -> Tensor:
            chunk = self.feed.arrange(chunk)
            return self.judge(tensors, chunk, self.feed.chance(self.judge, tensors, chunk, noise))

        predictions = outputs(answer, to_channels_last(self.rounds.params | self.rounds.buffers), inputs)
        accuracy = (predictions.argmax(1) == labels).double().mean()
        return {"test_loss": float(self.plan.loss(predictions, labels)), "test_accuracy": float(accuracy)}

    def _guarantee(self) -> dict[str, str]:
        """Return the upload's guarantee for an example over the whole schedule (dp).

        A pass over a share is no Poisson sample, so every update that may contain the example counts in full.
        """
        prove = getattr(inner_of(self.plan.upload), "guarantee", None)
        return {} if prove is None else {"guarantee": str(prove(self.plan.schedule.epochs * self.feed.passes))}

    def _numbers(self) -> dict[str, int]:
        return {"epoch": self.epoch, "round": self.rounds.number, "seed": self.seed}

    def _parts(self) -> dict[str, Params]:
        rounds = self.rounds
        parts = {"params": rounds.params, "buffers": rounds.buffers, "moments": rounds.moments}
        parts |= {f"user.{i}": state for i, state in enumerate(rounds.states)}
        return parts | {f"unsent.{i}": mask for i, mask in enumerate(rounds.tally.unsent)}


def train_collaboratively(
    net: nn.Module,
    data: Dataset,
    users: int,
    upload: Upload | None,
    schedule: str | Schedule | Sequence[float],
    rng: Generator,
    device: torch.device | str = "cpu",
    *,
    progress: Callable[[Row], None] | None = None,
    **others: Any,
) -> CollaborativeResult:
    """Train a copy of `net` on the train part of `data`; `others` are further fields of Plan.

    Example:
        >>> from secateur.data.load import load
        >>> from secateur.models.create import create
        >>> digits, rng = load("digits").at_most(200, Generator().manual_seed(0)), Generator().manual_seed(0)
        >>> net = create("digits-cnn", digits.input_shape, digits.classes, rng)
        >>> trained = train_collaboratively(net, digits, 2, None, [0.1], rng)
        >>> trained.description["augmentation"], sorted(trained.history[0])[:3]
        ('none', ['entries', 'epoch', 'error_norm'])
    """
    plan = Plan(users, SendAll() if upload is None else upload, schedule_of(schedule), **others)
    training = CollaborativeTraining(net, data, plan, rng, device)
    history = []
    for epoch in training.epochs():
        history.append(epoch.row)
        if progress is not None:
            progress(epoch.row)
    return CollaborativeResult(training.model(), history, tree.clone(training.rounds.states[0]), training.description)


def collaborate(
    run: Run,
    training: CollaborativeTraining,
    *,
    measure: Measure | None = None,
    also: Mapping[str, Any] | None = None,
    every: float = EVERY,
) -> CollaborativeResult:
    """Train, resume, or return the saved result of the same data, network, plan and seed.

    Until the stage is done, checkpoints are written to `unfinished/` after epochs, at most once in `every` seconds.
    They are less frequent if they would take more than SHARE of the time.

    Args:
        run: the run that stores the result.
        training: the training to run.
        measure: computes further columns of an epoch's row.
        also: further parts of the stage key; functions, such as the loss and `measure`, are in it by name only.
        every: seconds between two checkpoints; 0: one after every epoch.
    """
    depends = depends_of(training) | {"measure": name_function(measure), "also": dict(also or {})}
    key = key_of(STAGE, depends)
    result = run.stage(STAGE, depends, lambda: _train(run.folder, key, training, measure, every))
    forget(run.folder, STAGE, key)
    parts: dict[str, dict[str, Any]] = {"model": {}, "client": {}}
    for name, value in result.tensors.items():
        part, _, key_in_part = name.partition(".")
        parts[part][key_in_part] = value
    return CollaborativeResult(parts["model"], result.data["history"], parts["client"], training.description)


def depends_of(training: CollaborativeTraining) -> dict[str, Any]:
    """Return everything that a training's result depends on."""
    key = training_key(training.net, training.data, training.feed.shares, training.seed, training.device)
    return training.plan.description | {"upload": repr(training.plan.upload)} | key


def _train(folder: Path, key: str, training: CollaborativeTraining, measure: Measure | None, every: float) -> Result:
    path = folder / "unfinished" / f"{STAGE}-{key[:16]}.safetensors"
    history, saved_at = _resume(path, key, training), time.monotonic()
    plan, steps = training.plan, training.feed.steps
    with progress(
        f"{plan.users} users, {name_function(plan.upload)}", plan.schedule.epochs * steps, rate=True
    ) as advance:
        advance(training.epoch * steps)
        for epoch in training.epochs(advance):
            history.append(epoch.row | ({} if measure is None else measure(epoch)))
            if time.monotonic() - saved_at >= every and training.epoch < plan.schedule.epochs:
                started = time.monotonic()
                with explained(path):
                    path.parent.mkdir(exist_ok=True)
                write(path, encode(Result(training.state(), {"history": history}), key))
                saved_at = time.monotonic()
                every = every and max(every, (saved_at - started) / SHARE)
    model, client = training.model(), tree.clone(training.rounds.states[0])
    tensors = {f"model.{name}": value for name, value in model.items()}
    return Result(tensors | {f"client.{name}": value for name, value in client.items()}, {"history": history})


def _resume(path: Path, key: str, training: CollaborativeTraining) -> list[Row]:
    """Load the checkpoint of a killed training and return its rows; a damaged file counts as absent."""
    with explained(path):
        content = path.read_bytes() if path.exists() else None
    checkpoint = None if content is None else decode(content, key)
    if checkpoint is None:
        return []
    training.load(dict(checkpoint.tensors))
    history: list[Row] = checkpoint.data["history"]
    return history
