"""Rounds of collaborative SGD (dgp Algorithm 2, lines 3 to 10), and the batches and random draws of each round.

`CollaborativeRounds` holds the tensors of the server and of all users, and runs one round. `BatchStream` draws the
inputs of every round outside of the round, so that a CUDA graph can replay it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.data.dataset import Dataset
from secateur.data.partition import iid
from secateur.defenses.uploads import capturable, makes_anew
from secateur.errors import WrongInput
from secateur.federated.collaborative.flat_tensors import Flat, Statistics
from secateur.federated.collaborative.measurements import TrainingStats
from secateur.federated.collaborative.plan import Plan, StepGradients, StepInputs, StepMessages, UserInputs
from secateur.federated.collaborative.uploads import OneByOne, StackedUploads
from secateur.functional import Ask, Functional, split
from secateur.gpu.graphs import Branches, Captured, cudnn_times
from secateur.inference import to_channels_last
from secateur.interfaces import Batch, Params, UploadContext
from secateur.seeding import derive


class CollaborativeRounds:
    """The server's model and momentum, every user's state, and the round that changes them.

    All tensors outside of a backward are in plain strides and stay in place: a captured round reads and writes them in
    place. For the backwards the filters are copied into channels_last once a round.

    Args:
        net: the shared model.
        plan: users, upload, momentum and loss.
        state: the parameters and buffers of round 1.
        device: a GPU captures rounds in CUDA graphs.
        stacked: True: the uploads are one operation on all users. None: on a GPU, where a graph can hold them; a CPU
            lacks the memory.
    """

    def __init__(
        self,
        net: nn.Module,
        plan: Plan,
        state: Params,
        device: torch.device,
        stacked: bool | None = None,
    ) -> None:
        self.net, self.plan = net, plan
        self.params, buffers = (_copy_plain(part, device) for part in split(net, state))
        self.moments = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self.number = 0  # rounds so far
        self.rng = Generator()  # of the uploads' noise
        anew, graphs = makes_anew(plan.upload), device.type == "cuda"
        self.learner = Functional(net, training=not anew, device=device)
        self.batchnorm: Literal["eval", "batch"] = "eval" if anew else "batch"
        self.statistics = Statistics(self.learner.structure, buffers, plan.users)
        self.buffers = self.statistics.buffers
        flat = Flat(self.params)
        self.tally = TrainingStats(flat, plan.users)
        one_type = len({value.dtype for value in self.params.values()}) == 1
        if stacked is None:
            stacked = graphs and one_type and capturable(plan.upload) and plan.liar is None
        self.uploads: OneByOne | StackedUploads = (
            StackedUploads(plan, self.params, self.tally, flat) if stacked else OneByOne(plan, self.params, self.tally)
        )
        self.branches = Branches(plan.users, device, parallel=graphs)
        self._gradients = Captured(self.gradients, device) if graphs and not stacked else self.gradients
        self._round = Captured(self._run_uncaptured, device) if graphs and stacked else self._run_uncaptured

    @property
    def states(self) -> list[Params]:
        """The state that each user keeps."""
        return self.uploads.states

    def __call__(self, step: StepInputs) -> StepMessages:
        """Run one step of all users; on a GPU the next step overwrites the result."""
        if isinstance(self.uploads, StackedUploads):
            self.uploads.draw(self.rng)
        exchanged = self._round(step)
        self.number += 1
        return exchanged

    def _run_uncaptured(self, step: StepInputs) -> StepMessages:
        """Run one step of all users without capture."""
        return self.exchange(step, self._gradients(step))

    def gradients(self, step: StepInputs) -> StepGradients:
        """Return every user's gradient at the shared model, which stays as it is (line 4)."""
        leaves = {name: value.detach().requires_grad_() for name, value in to_channels_last(self.params).items()}
        buffers = self.statistics.copies()  # BatchNorm updates them

        def one(user: int) -> tuple[Tensor, Params]:
            (inputs, labels), dropout = step.users[user]
            tensors = leaves | self.statistics.buffers_of(user, buffers)
            loss = self.plan.loss(self.learner(tensors, inputs, dropout), labels)
            wanted = list(leaves.values())
            values = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            return loss.detach(), self.uploads.keep(user, dict(zip(leaves, values, strict=True)))

        with cudnn_times():  # in the steps before a capture: a replay does not run this line
            losses, grads = zip(*self.branches(one), strict=True)
        return StepGradients(list(losses), list(grads), buffers)

    @torch.no_grad()
    def exchange(self, step: StepInputs, gradients: StepGradients) -> StepMessages:
        """Compress, send and average the gradients, and take the server's step (lines 5 to 10)."""
        plan, model = self.plan, self.params | self.buffers

        def build_context(user: int) -> UploadContext:
            batch = step.users[user].batch
            return UploadContext(self.net, model, batch, self.number, self.rng, plan.loss, self.batchnorm)

        self.tally.losses(gradients.losses, [user.batch.size for user in step.users])
        exchanged = self.uploads(gradients.grads, step.chosen, build_context)
        self._descend(exchanged.average, step.rate)
        self.statistics.take(gradients.buffers)
        return exchanged

    def _descend(self, average: Params, rate: Tensor) -> None:
        """Take the server's step with the momentum and weight decay of torch.optim.SGD (line 10)."""
        weights, moments = ([*part.values()] for part in (self.params, self.moments))
        step = [average[name] for name in self.params]
        torch._foreach_add_(step, weights, alpha=self.plan.weight_decay)
        torch._foreach_mul_(moments, self.plan.momentum)
        torch._foreach_add_(moments, step)
        torch._foreach_sub_(weights, torch._foreach_mul(moments, rate))


class BatchStream:
    """The data on the device, each user's share of the data, and the rounds of an epoch.

    All draws of an epoch come from the seed and the epoch's number, so no generator is kept between epochs.
    """

    def __init__(self, net: nn.Module, data: Dataset, plan: Plan, seed: int, device: torch.device) -> None:
        self.plan, self.seed, self.device = plan, seed, device
        self.dtype = next(net.parameters()).dtype
        self.needs_two = any(isinstance(module, _BatchNorm) for module in net.modules())
        inputs, labels = data.batch.to(device)
        self.train = Batch(inputs[: data.train_size], labels[: data.train_size])
        self.test = Batch(inputs[data.train_size :], labels[data.train_size :])
        self.shares = self._shares()
        batches = [len(self._split_batches(rows)) for rows in self.shares]
        self.steps = max(batches)  # of an epoch
        self.passes = -(-self.steps // min(batches))  # over the smallest share in an epoch, the last pass cut short
        self._asks: dict[tuple[Functional, int], list[Ask]] = {}

    def __call__(self, epoch: int, rounds: CollaborativeRounds) -> Iterator[StepInputs]:
        """Yield every step's batches and the draws inside the users' networks; uploads draw from `rounds.rng`."""
        plan, device = self.plan, self.device
        uploads, chooser, seeder = (derive(self.seed, purpose, epoch) for purpose in ("upload", "broadcast", "noise"))
        noise = Generator(device).manual_seed(int(torch.randint(2**62, (), generator=seeder)))
        rounds.rng, tensors = uploads, rounds.params | rounds.buffers
        steps = list(self.batches(epoch))
        chosen = torch.randint(plan.users, (len(steps), 1), generator=chooser).to(device)
        rate = torch.tensor(plan.schedule.rate(epoch), dtype=self.dtype, device=device)
        for rows, user in zip(steps, chosen, strict=True):
            inputs = [
                UserInputs(batch, self.chance(rounds.learner, tensors, batch.inputs, noise))
                for batch in self._users(rows, noise)
            ]
            yield StepInputs(inputs, rate, user)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """Return the rows of an epoch step by step, a tensor for each user.

        A last single example joins the batch before it where BatchNorm needs two.
        """
        rng = derive(self.seed, "order", epoch)
        by_user: list[list[Tensor]] = []
        for rows in self.shares:
            batches: list[Tensor] = []
            while len(batches) < self.steps:
                batches += self._split_batches(rows[torch.randperm(len(rows), generator=rng)].to(self.device))
            by_user.append(batches[: self.steps])
        return zip(*by_user, strict=True)

    def chance(self, function: Functional, tensors: Params, inputs: Tensor, noise: Generator) -> tuple[Tensor, ...]:
        """Return the draws of a forward of so many inputs: dropout, and noise inside the network."""
        key = function, len(inputs)
        if key not in self._asks:
            self._asks[key] = function.asks(tensors, inputs)
        return tuple(ask.draw(noise) for ask in self._asks[key])

    def arrange(self, inputs: Tensor) -> Tensor:
        """Return inputs in the network's dtype and memory format."""
        return to_channels_last({"": inputs.to(self.dtype)})[""]

    def _shares(self) -> list[Tensor]:
        """Return the rows of the train part that each user holds."""
        planned, rows = self.plan.shares, self.train.size
        shares = iid(rows, self.plan.users, derive(self.seed, "shares")) if planned is None else list(planned)
        every = torch.cat(list(shares))
        if int(every.min()) < 0 or int(every.max()) >= rows or bool((every.sort().values.diff() == 0).any()):
            raise WrongInput("shares", f"must be different rows of the train part; allowed: 0 to {rows - 1}, once each")
        if self.needs_two and min(map(len, shares)) < 2:
            raise WrongInput("shares", "of one example are not allowed: BatchNorm needs two")
        return shares

    def _split_batches(self, rows: Tensor) -> list[Tensor]:
        """Split rows into batches; a last single example joins the batch before it where BatchNorm needs two."""
        batches = list(torch.split(rows, self.plan.batch_size))
        if self.needs_two and len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def _users(self, rows: Sequence[Tensor], noise: Generator) -> list[Batch]:
        """Return every user's batch; the images of all users are taken and augmented at once."""
        inputs, labels = self.train.take(torch.cat(list(rows)))
        if self.plan.transform is not None:
            inputs = self.plan.transform(inputs, noise)
        sizes = [len(batch) for batch in rows]
        parts = zip(torch.split(self.arrange(inputs), sizes), torch.split(labels, sizes), strict=True)
        return [Batch(*part) for part in parts]


def _copy_plain(tensors: Params, device: torch.device) -> Params:
    """Return copies on the device in plain strides."""
    return {n: v.detach().to(device).clone(memory_format=torch.contiguous_format) for n, v in tensors.items()}
