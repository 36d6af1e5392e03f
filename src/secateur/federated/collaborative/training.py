"""Collaborative SGD: N users send what an upload makes of their gradients, and a server averages (dgp Algorithm 2).

Each step every user takes the next batch of its own rows and its gradient at the shared model; the server averages what
is sent and takes one step of SGD with momentum and weight decay. An epoch is one pass over the largest share; a user
with fewer batches begins again. BatchNorm normalises by each user's batch; the server's running statistics become the
average of the users' updated ones, sent beside the gradients as they are. Under an upload that makes its gradient anew
by running statistics (dp) these stay as they are, because no epsilon would cover them.

ADGP trusts one user a round: the one that is drawn broadcasts positions, everybody sends inside them only, and nobody
can tell whether they are its own (defenses/adgp.py says what a lie does). `Plan.liar` puts a lie in their place.

On a CPU the users go one by one. On a GPU a whole step is one CUDA graph, its batches, noise and augmentation drawn
outside: one backward gives all users' gradients (shared_backward.py), or where that is not right the backwards are a
branch a user, and after them the users are one axis (uploads.py). Uploads that no graph can hold (defenses/uploads.py)
run eager there and one by one, after captured gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.defenses.uploads import SendAll, aligned, inner_of
from secateur.errors import WrongInput
from secateur.federated.collaborative.measurements import Row
from secateur.federated.collaborative.plan import Plan, Schedule, schedule_of
from secateur.federated.collaborative.rounds import Feed, Rounds
from secateur.functional import Functional, joined
from secateur.inference import arranged, outputs
from secateur.interfaces import Mask, Params, Upload
from secateur.models.create import check
from secateur.seeding import derive

TIMES = ("seconds",)  # of a row: what differs from run to run


@dataclass(frozen=True, eq=False)
class Epoch:
    """What an epoch came to."""

    row: Row
    sent: Sequence[Params]  # by every user in its last step; to be read before the next epoch is asked for
    inside: Mask | None = None  # what was broadcast in that step (adgp)


@dataclass(frozen=True, eq=False)
class Collaborated:
    """A model that many users trained."""

    state: Params  # a full state_dict
    history: list[Row]
    client: Params  # what the first user keeps at home in the end: its residual
    stated: dict[str, Any]  # the plan and what is proved of it, for whoever reads the result


class Training:
    """A collaborative training that can be followed epoch by epoch, and put down and taken up between two."""

    def __init__(
        self, net: nn.Module, data: Dataset, plan: Plan, rng: Generator, device: torch.device | str = "cpu"
    ) -> None:
        check(net, data.input_shape, data.classes)
        if not tree.trained(net):
            raise WrongInput("model", "trains no parameter; leave requires_grad on for those that users train")
        self.net, self.data, self.plan, self.device = net, data, plan, torch.device(device)
        self.seed = int(torch.randint(2**62, (), generator=rng.clone_state()))
        self.rounds = Rounds(net, plan, tree.state_of(net), self.device)
        self.judge = Functional(net, training=False, device=self.device)
        self.feed = Feed(net, data, plan, self.seed, self.device)
        self.stated = plan.stated | self._proved()
        self.epoch = 0  # epochs that are done

    def epochs(self, advance: Callable[[int], None] | None = None) -> Iterator[Epoch]:
        """Train from where it stands to the end of the schedule, an epoch at a time; `advance` follows the steps."""
        while self.epoch < self.plan.schedule.epochs:
            yield self._train(self.epoch + 1, advance)

    def model(self) -> Params:
        """The shared model as it is now: a state_dict of copies."""
        return joined(self.net, self.rounds.params | self.rounds.buffers)

    def state(self) -> Params:
        """Everything that the next epoch depends on, for `load`; chance depends on the seed and the epoch alone."""
        parts = {f"{part}.{name}": value for part, values in self._parts().items() for name, value in values.items()}
        return parts | {name: torch.tensor(value) for name, value in self._numbers().items()}

    def load(self, state: Params) -> None:
        """Go on from what `state` gave, in a training of the same plan, data and seed."""
        wanted = {f"{part}.{name}": value for part, values in self._parts().items() for name, value in values.items()}
        if {*state} != {*wanted, *self._numbers()} or int(state["seed"]) != self.seed:
            raise WrongInput("state", "is of another training; give what a training of this plan and seed kept")
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(state[name])
        self.epoch, self.rounds.number = int(state["epoch"]), int(state["round"])

    def _train(self, epoch: int, advance: Callable[[int], None] | None) -> Epoch:
        begun, rate = time.perf_counter(), self.plan.schedule.rate(epoch)
        examples = steps = 0
        for given in self.feed(epoch, self.rounds):
            exchanged = self.rounds(given)
            examples += sum(user.batch.size for user in given.given)
            steps += 1
            if advance is not None:
                advance(1)
        tally, follows = self.rounds.tally, aligned(self.plan.upload) is not None
        row = {"epoch": epoch, "learning_rate": rate} | tally.row(examples, steps, self.rounds.states, follows)
        row["seconds"] = time.perf_counter() - begun
        row |= self._judged(epoch)
        if not math.isfinite(row["train_loss"]):
            raise WrongInput("model", f"the loss became NaN in epoch {epoch}; lower the learning rate, check the data")
        self.epoch = epoch
        return Epoch(row, exchanged.sent, exchanged.inside)

    def _judged(self, epoch: int) -> Row:
        """How the model does on the test part, where there is one; noise inside it is drawn here too."""
        inputs, labels = self.feed.test
        if not len(labels):
            return {}
        seed = int(torch.randint(2**62, (), generator=derive(self.seed, "judge", epoch)))
        noise = Generator(self.device).manual_seed(seed)

        def answer(tensors: Params, part: Tensor) -> Tensor:
            part = self.feed.arranged(part)
            return self.judge(tensors, part, self.feed.chance(self.judge, tensors, part, noise))

        found = outputs(answer, arranged(self.rounds.params | self.rounds.buffers), inputs)
        right = (found.argmax(1) == labels).double().mean()
        return {"test_loss": float(self.plan.loss(found, labels)), "test_accuracy": float(right)}

    def _proved(self) -> dict[str, str]:
        """What the upload proves of an example over the whole schedule (dp).

        A pass over a share is no Poisson sample, so every update that the example may be in counts in full.
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
) -> Collaborated:
    """Train `net`, which stays as it is, on the train part of `data`; `others` are further fields of Plan.

    Example:
        >>> from secateur.data.load import load
        >>> from secateur.models.create import create
        >>> digits, rng = load("digits").at_most(200, Generator().manual_seed(0)), Generator().manual_seed(0)
        >>> net = create("digits-cnn", digits.input_shape, digits.classes, rng)
        >>> made = train_collaboratively(net, digits, 2, None, [0.1], rng)
        >>> made.stated["augmentation"], sorted(made.history[0])[:3]
        ('none', ['entries', 'epoch', 'error_norm'])
    """
    plan = Plan(users, SendAll() if upload is None else upload, schedule_of(schedule), **others)
    training = Training(net, data, plan, rng, device)
    history = []
    for epoch in training.epochs():
        history.append(epoch.row)
        if progress is not None:
            progress(epoch.row)
    return Collaborated(training.model(), history, tree.clone(training.rounds.states[0]), training.stated)
