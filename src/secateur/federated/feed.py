"""What every step of a collaborative training is given: the users' batches and all of its chance, drawn outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.chance import derive
from secateur.data.dataset import Dataset
from secateur.data.partition import iid
from secateur.errors import WrongInput
from secateur.federated.plan import Plan
from secateur.federated.rounds import Rounds
from secateur.federated.steps import Given, Round
from secateur.functional import Ask, Functional
from secateur.interfaces import Batch, Params
from secateur.prediction import arranged


class Feed:
    """The data on the device, each user's share of it, and an epoch's rounds.

    All draws of an epoch come from the seed and the epoch's number, so nothing of chance needs to be kept between two.
    """

    def __init__(self, net: nn.Module, data: Dataset, plan: Plan, seed: int, device: torch.device) -> None:
        self.plan, self.seed, self.device = plan, seed, device
        self.dtype = next(net.parameters()).dtype
        self.needs_two = any(isinstance(module, _BatchNorm) for module in net.modules())
        inputs, labels = data.batch.to(device)
        self.train = Batch(inputs[: data.train_size], labels[: data.train_size])
        self.test = Batch(inputs[data.train_size :], labels[data.train_size :])
        self.shares = self._shares()
        batches = [len(self._cut(rows)) for rows in self.shares]
        self.steps = max(batches)  # an epoch
        self.passes = -(-self.steps // min(batches))  # over the smallest share in an epoch, a last one cut short
        self._asks: dict[tuple[Functional, int], list[Ask]] = {}

    def __call__(self, epoch: int, rounds: Rounds) -> Iterator[Round]:
        """Every step's batches, and the chance inside the users' networks; the uploads' own comes from `rounds.rng`."""
        plan, device = self.plan, self.device
        uploads, chooser, seeder = (derive(self.seed, what, epoch) for what in ("upload", "broadcast", "noise"))
        noise = Generator(device).manual_seed(int(torch.randint(2**62, (), generator=seeder)))
        rounds.rng, tensors = uploads, rounds.params | rounds.buffers
        steps = list(self.batches(epoch))
        chosen = torch.randint(plan.users, (len(steps), 1), generator=chooser).to(device)
        rate = torch.tensor(plan.schedule.rate(epoch), dtype=self.dtype, device=device)
        for rows, user in zip(steps, chosen, strict=True):
            given = [
                Given(batch, self.chance(rounds.learner, tensors, batch.inputs, noise))
                for batch in self._users(rows, noise)
            ]
            yield Round(given, rate, user)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """The rows of an epoch step by step, a user each.

        A last single example joins the batch before it where BatchNorm needs two.
        """
        rng = derive(self.seed, "order", epoch)
        by_user: list[list[Tensor]] = []
        for rows in self.shares:
            batches: list[Tensor] = []
            while len(batches) < self.steps:
                batches += self._cut(rows[torch.randperm(len(rows), generator=rng)].to(self.device))
            by_user.append(batches[: self.steps])
        return zip(*by_user, strict=True)

    def chance(self, function: Functional, tensors: Params, inputs: Tensor, noise: Generator) -> tuple[Tensor, ...]:
        """What a forward of so many inputs draws: dropout, and noise inside the network."""
        key = function, len(inputs)
        if key not in self._asks:
            self._asks[key] = function.asks(tensors, inputs)
        return tuple(ask.draw(noise) for ask in self._asks[key])

    def arranged(self, inputs: Tensor) -> Tensor:
        """Inputs as the network takes them."""
        return arranged({"": inputs.to(self.dtype)})[""]

    def _users(self, rows: Sequence[Tensor], noise: Generator) -> list[Batch]:
        """Every user's batch as it uses it; the pictures of all are taken and augmented at once."""
        inputs, labels = self.train.take(torch.cat(list(rows)))
        if self.plan.transform is not None:
            inputs = self.plan.transform(inputs, noise)
        sizes = [len(each) for each in rows]
        parts = zip(torch.split(self.arranged(inputs), sizes), torch.split(labels, sizes), strict=True)
        return [Batch(*each) for each in parts]

    def _shares(self) -> list[Tensor]:
        """Which rows of the train part each user holds."""
        given, rows = self.plan.shares, self.train.size
        shares = iid(rows, self.plan.users, derive(self.seed, "shares")) if given is None else list(given)
        every = torch.cat(shares)
        if int(every.min()) < 0 or int(every.max()) >= rows or bool((every.sort().values.diff() == 0).any()):
            raise WrongInput("shares", f"must be different rows of the train part; allowed: 0 to {rows - 1}, once each")
        if self.needs_two and min(map(len, shares)) < 2:
            raise WrongInput("shares", "of one example are not allowed: BatchNorm needs two")
        return shares

    def _cut(self, rows: Tensor) -> list[Tensor]:
        batches = list(torch.split(rows, self.plan.batch_size))
        if self.needs_two and len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches
