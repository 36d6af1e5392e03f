"""Rounds over sub-models: cut, train, send, average each cell over the clients that trained it (mapp_fl Figure 2).

Read `begin` and `finish` first: `begin` returns the turns of a round, `finish` averages their outputs. In between a
`SubmodelTrainer` trains them, for this federation alone or for several (`StackedFederations`). Random draws depend on
the seed and the round's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.attacks.observer import Observer, Observers
from secateur.federated.averaging import alive_of
from secateur.federated.checkpoint import Resumable, check_state
from secateur.federated.faults import NO_ANSWER, Fault, apply_fault, refusal
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.clients import (
    SubmodelResult,
    SubmodelSent,
    SubmodelTrainer,
    SubmodelTurn,
    SubmodelUpload,
    pick_rows,
)
from secateur.federated.submodels.networks import Narrow, SubmodelEvaluation, build_narrow, without_statistics
from secateur.federated.submodels.structure import ClientAndRound, Structure, SubmodelIndex, flat_of, params_of
from secateur.federated.traffic import Ledger, Round, value_bytes
from secateur.functional import join_state
from secateur.interfaces import Batch, Params
from secateur.models.create import check
from secateur.seeding import derive, derive_on


class SubmodelView(NamedTuple):
    """One client's turn in one round, for an observer; `rows` is the truth, for evaluating an attack."""

    round: int
    client: int
    rate: float  # the share of the server's channels
    net: nn.Module  # the structure of the client's model
    received: Params
    sent: Params  # the upload, as an attacker sees it
    channels: dict[str, Tensor]  # layer -> the outputs that the client keeps, in the server's numbers
    rows: Tensor  # of the data's train part: the client's examples
    covered: Params | None = None  # True for entries that were sent; None: all
    begun: Params | None = None  # the start of training, withheld entries put back; None: `received`
    truth: Callable[[], Batch] | None = None  # returns the examples of the turn in their order; evaluator only

    @property
    def seen(self) -> tuple[SubmodelView]:
        """The updates that an observer is shown at once: this one."""
        return (self,)


class Turn(NamedTuple):
    """A client's channels in a round, and the model that it is sent."""

    client: int
    cut: SubmodelIndex
    received: Tensor


class SubmodelFederation(Resumable):
    """A federation whose clients train parts of the model."""

    terms: SubmodelSpec
    exact = False  # True: updates are added in float64, as clients answer in any order

    def __init__(
        self,
        net: nn.Module,
        data: Dataset,
        terms: SubmodelSpec,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        observers: Sequence[Observer] = (),
        execution: str = "auto",
        beside: SubmodelFederation | None = None,  # another federation on this data, whose trainer is shared
    ) -> None:
        check(net, data.input_shape, data.classes)
        if terms.local.augment is not None:
            terms.local.augment.check(data)
        self.net, self.terms, self.seed, self.device = (
            without_statistics(net).to(device),
            terms,
            seed,
            torch.device(device),
        )
        self.panel = Observers(observers)
        self.rates = terms.used_rates
        same = beside is not None and f"{beside.net}" == f"{self.net}"  # True: channel sets are shared too
        self.structure: Structure = beside.structure if beside and same else Structure(self.net, data.input_shape)
        self.structure.check(terms.rule, self.rates)
        terms.check_rows(self.net)
        self.flat = flat_of(dict(self.net.named_parameters()))
        if beside is None:
            inputs, labels = data.batch.to(self.device)
            whole = Batch(inputs.to(self.flat.dtype), labels)
            self.train = Batch(*(part[: data.train_size] for part in whole))
            self.test = Batch(*(part[data.train_size :] for part in whole))
            self.trainer = SubmodelTrainer(self.train, terms.local, execution)
        else:
            self.train, self.test, self.trainer = beside.train, beside.test, beside.trainer
        self.judge = SubmodelEvaluation(self.train, self.test, terms)
        self.keys = {rate: self.trainer.add(self._narrow_model(rate, data)) for rate in sorted({*self.rates, 1.0})}
        self.sender = SubmodelUpload(terms, self.structure.shapes)
        self.states: dict[int, Params] = {}
        self.ledger = Ledger(squares=False)
        self.owned = [self._mark_labels(rows, data.classes) for rows in terms.shares] if terms.own_labels else None
        self._turns: list[Turn] = []
        self._faults: dict[int, Fault] = {}

    def run_round(self, number: int) -> Round:
        """Run one round: cut, train, send, average."""
        return self.finish(number, self.trainer(self.begin(number)))

    def rounds(self) -> Iterator[Round]:
        """Yield the remaining rounds, then finish the attacks that observers postponed."""
        yield from super().rounds()
        self.panel.finish()

    def model(self) -> Params:
        """Return the server's model as it is now: a state_dict of copies."""
        return join_state(self.net, params_of(self.flat, self.structure.shapes) | dict(self.net.named_buffers()))

    def begin(self, number: int) -> list[SubmodelTurn]:
        """Return the jobs of a round's clients that will answer."""
        terms, traffic, rng = self.terms, self.ledger.traffic, derive(self.seed, "clients", number)
        count = len(terms.shares)
        clients = sorted(torch.randperm(count, generator=rng)[: terms.per_round or count].tolist())
        steps = [terms.local.count_steps(len(terms.shares[client])) for client in clients]
        self._faults = terms.faults.draw(clients, steps, self.seed, derive(self.seed, "faults", number))
        jobs, self._turns = [], []
        for client in clients:
            turn = self.broadcast(number, client)
            params = params_of(turn.received, turn.cut.shapes)
            traffic.down[client] += traffic.submodel_bytes(f"model {self.rates[client]}", params)
            if (fault := self._faults.get(client)) in NO_ANSWER:
                self.ledger.lose(number, client, fault)
                continue
            self._turns.append(turn)
            jobs.append(self._job(number, turn))
        return jobs

    def finish(self, number: int, results: Sequence[SubmodelResult]) -> Round:
        """Average the trained models, and evaluate in evaluation rounds."""
        trained = zip(self._turns, results, strict=True)
        return self._average(number, ((turn, self._upload(number, turn, output)) for turn, output in trained))

    def broadcast(self, number: int, client: int) -> Turn:
        """Return the model that a client is sent in a round, and its channels."""
        rate = self.rates[client]
        cut = self.structure.cut(self.terms.rule, ClientAndRound(client, len(self.rates), number), rate)
        return Turn(client, cut, self.flat if rate == 1 else self.flat[cut.index])

    def narrow(self, client: int) -> Narrow:
        """Return the model of a client's width."""
        return self.trainer.narrow[self.keys[self.rates[client]]]

    def was_observed(self, number: int) -> bool:
        """Return True if an observer looks at the round's updates."""
        return bool(self.panel.select_observers(number))

    @property
    def puts_off(self) -> bool:
        """True if updates are kept, to be attacked together later."""
        return self.panel.waits

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Return everything that the next round depends on, for `load`: tensors, and plain values."""
        kept, observers = self.panel.state()
        tensors = {"server": self.flat} | tree.nest({"client": tree.nest(self.states), "observer": kept})
        data = {"round": self.number, "seed": self.seed, "ledger": self.ledger.state(), "observers": observers}
        return tensors, data

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`, in a federation of the same specification, data and seed."""
        check_state(data["seed"] == self.seed and tensors["server"].shape == self.flat.shape)
        self.flat = tensors["server"].to(self.flat)
        clients = tree.parts(tree.part(tensors, "client"))
        self.states = {int(client): tree.to(state, self.device) for client, state in clients.items()}
        self.panel.load(tree.part(tensors, "observer"), data["observers"])
        self.number = data["round"]
        self.ledger.load(data["ledger"])

    def _narrow_model(self, rate: float, data: Dataset) -> Narrow:
        scaler = self.terms.scaler
        net = build_narrow(self.net, self.structure, rate, scaler, data.input_shape, data.classes)
        return Narrow(net, rate, scaler, self.device)

    def _mark_labels(self, rows: Tensor, classes: int) -> Tensor:
        """Return (K,) 1 for the labels that occur among these rows, else 0."""
        owned = torch.zeros(classes, dtype=self.flat.dtype, device=self.device)
        owned[self.train.labels[rows.to(self.device)]] = 1
        return owned

    def _job(self, number: int, turn: Turn) -> SubmodelTurn:
        client, owned = turn.client, None if self.owned is None else self.owned[turn.client]
        _, _, start = self._begin(number, client)
        return self.job(number, client, self.terms.shares[client], start)._replace(owned=owned)

    def job(self, number: int, client: int, rows: Tensor, start: Tensor, epochs: int | None = None) -> SubmodelTurn:
        """Return the job of a client that trains on some rows from `start`, with the draws of a round."""
        picks, noise = (
            self.pick(number, client, rows, epochs),
            derive_on(self.device, self.seed, "noise", number, client),
        )
        return SubmodelTurn(self.narrow(client).key, start, picks, noise)

    def pick(self, number: int, client: int, rows: Tensor, epochs: int | None = None) -> Sequence[Tensor]:
        """Return the rows of a client's turn in their order, with moves where pictures are augmented."""
        local = self.terms.local
        orders = local.order_rows(rows, derive(self.seed, "rows", number, client), epochs)
        return pick_rows(orders, local.augment, derive(self.seed, "augment", number, client))

    def examples(self, number: int, client: int) -> Batch:
        """Return the examples of a client's turn in their order, augmented as in its training."""
        picks = torch.cat([*self.pick(number, client, self.terms.shares[client])]).to(self.device)
        return Batch(*self.trainer.batch(picks))

    def _begin(self, number: int, client: int) -> tuple[Narrow, SubmodelIndex, Tensor]:
        """Return a client's width and channels in a round, and the model that it begins with."""
        turn = self.broadcast(number, client)
        return self.narrow(client), turn.cut, self.sender.start(turn.received, self._state(client), turn.cut)

    def _state(self, client: int) -> Params:
        return self.states[client] if client in self.states else self.sender.init(self.flat)

    @torch.no_grad()
    def _upload(self, number: int, turn: Turn, result: SubmodelResult) -> SubmodelSent:
        """Return the upload of a client after its training."""
        client = turn.client
        narrow, rng = self.narrow(client), derive(self.seed, "defense", number, client)
        return self.sender(narrow.net, turn.cut, turn.received, result.flat, self._state(client), rng)

    @torch.no_grad()
    def _average(self, number: int, sent: Iterable[tuple[Turn, SubmodelSent]]) -> Round:
        """Average the uploads of a round as they arrive, and evaluate in evaluation rounds."""
        last = number == self.terms.rounds
        judged = self.judge.clients(number, partial(self._begin, number)) if last else []  # before the average
        cells = Cells(self.flat, self.exact)
        for turn, upload in sent:
            self._take_upload(number, turn, upload, cells)
        self.flat = cells.average(self.terms.uncovered)
        self.number, self._turns = number, []
        if not (last or number % self.terms.evaluate_every == 0):
            return Round(number)
        scores = self.judge(self.trainer.narrow[self.keys[1.0]], self.flat, self.terms.shares)
        scores |= {"covered": cells.share, "parameters": float(len(self.flat))}
        return Round(number, self.ledger.measures(number, scores, last) + judged)

    def _take_upload(self, number: int, turn: Turn, sent: SubmodelSent, cells: Cells) -> None:
        """Add one client's upload to the cells, or note the fault."""
        client, shapes = turn.client, turn.cut.shapes
        values = apply_fault(params_of(sent.flat, shapes), self._faults.get(client))
        fault = refusal(values, params_of(turn.received, shapes))
        if fault is None and not bool(alive_of(values if client in self._faults else {"": sent.flat})):
            fault = "nan"
        if fault is not None:
            self.ledger.lose(number, client, fault)
            return
        self.ledger.traffic.up[client] += self._message_bytes(self.rates[client], values, sent.message)
        weight = 1.0 if self.terms.averaging == "uniform" else float(len(self.terms.shares[client]))
        covered = sent.covered
        if self.owned is not None:
            label_mask = of_own_labels(self.owned[client], self.structure.outputs, turn.cut)
            covered = label_mask if covered is None else label_mask * covered
        cells.add(turn.cut.index, sent.flat, weight, covered)
        if self.was_observed(number):
            self._observe(number, turn, sent)  # before `_keep`: the client began with its earlier state
        self._keep(client, sent.state)

    def _message_bytes(self, rate: float, values: Params, message: Params | None) -> int:
        """Return the bytes of an upload: of the whole model, or of a message that is 0 where nothing is sent."""
        traffic = self.ledger.traffic
        if message is None:
            return traffic.submodel_bytes(f"model {rate}", values)
        return traffic.submodel_bytes(f"positions {rate}", message, value_bytes(message))

    def _observe(self, number: int, turn: Turn, sent: SubmodelSent) -> None:
        client, shapes = turn.client, turn.cut.shapes
        net = self.narrow(client).net
        received, uploaded = (tree.clone(params_of(flat, shapes)) for flat in (turn.received, sent.flat))
        rate, rows = self.rates[client], self.terms.shares[client]
        covered = begun = None
        if sent.covered is not None:
            covered = params_of(sent.covered.bool(), shapes)
            begun = tree.clone(params_of(self._begin(number, client)[2], shapes))
        shown = (rate, net, received, uploaded, turn.cut.channels, rows, covered, begun)
        view = SubmodelView(number, client, *shown, partial(self.examples, number, client))
        for observer in self.panel.select_observers(number):
            observer(view)

    def _keep(self, client: int, state: Params) -> None:
        """Keep the client's state after a turn that the server took."""
        if state:
            self.states[client] = tree.clone(state)


class Cells:
    """The sums of the clients' numbers, at their places in the server's flat vector (HeteroFL; mapp_fl Figure 2).

    Example:
        >>> cells = Cells(torch.tensor([5.0, 6.0, 7.0]))
        >>> cells.add(torch.tensor([0, 2]), torch.tensor([1.0, 2.0]), 1.0)
        >>> cells.add(torch.tensor([2]), torch.tensor([8.0]), 1.0)
        >>> cells.average("keep").tolist(), cells.average("zero").tolist()
        ([1.0, 6.0, 5.0], [1.0, 0.0, 5.0])
    """

    def __init__(self, before: Tensor, exact: bool = False) -> None:
        self.before = before
        dtype = torch.float64 if exact else before.dtype  # in float64 the order of adding does not show
        self.total, self.count = (torch.zeros_like(before, dtype=dtype) for _ in range(2))

    def add(self, index: Tensor, flat: Tensor, weight: float, covered: Tensor | None = None) -> None:
        """Add one client's numbers at their places; `covered` is 1 where a number counts, else 0 (None: all count)."""
        flat = flat.to(self.total.dtype)
        counted = torch.ones_like(flat) if covered is None else covered.to(flat.dtype)
        self.total.index_add_(0, index, flat * counted, alpha=weight)
        self.count.index_add_(0, index, counted, alpha=weight)

    def average(self, uncovered: str) -> Tensor:
        """Return the mean of each cell; a cell that no client trained keeps its value, or becomes zero."""
        missing = self.before if uncovered == "keep" else torch.zeros_like(self.before)
        return torch.where(self.count > 0, self.total / self.count, missing).to(self.before.dtype)

    @property
    def share(self) -> float:
        """The share of all cells that at least one client trained."""
        return float((self.count > 0).double().mean())


def of_own_labels(owned: Tensor, outputs: Sequence[str], cut: SubmodelIndex) -> Tensor:
    """Return (P_c,) 1 where a client's cell counts, else 0.

    Of the classifier `outputs` only the rows of the client's own labels count.
    """
    classifier = {f"{name}.{part}" for name in outputs for part in ("weight", "bias")}
    counts = {name: owned.new_ones(shape) for name, shape in cut.shapes.items()}
    for name in classifier & counts.keys():
        counts[name] *= owned.view(-1, *(1 for _ in cut.shapes[name][1:]))
    return flat_of(counts)


class StackedFederations(Resumable):
    """Federations that train as one (seeds, rules, large clients): their clients are lanes of one stack.

    They have equal numbers of rounds and one trainer (`beside`). Each has the same result as alone.
    """

    def __init__(self, federations: Sequence[SubmodelFederation]) -> None:
        self.federations, first = list(federations), federations[0]
        if any(fed.trainer is not first.trainer or fed.terms.local != first.terms.local for fed in federations):
            raise WrongInput("federations", "must share trainer and local training; make the others beside the first")
        if len({fed.terms.rounds for fed in federations}) > 1:
            raise WrongInput("rounds", "differ between federations that run together; use equal ones")
        self.terms, self.number = first.terms, first.number

    def run_round(self, number: int) -> Round:
        """Run one round of all federations."""
        jobs = [fed.begin(number) for fed in self.federations]
        trained = iter(self.federations[0].trainer([job for fed_jobs in jobs for job in fed_jobs]))
        finished = [
            fed.finish(number, [next(trained) for _ in fed_jobs])
            for fed, fed_jobs in zip(self.federations, jobs, strict=True)
        ]
        for fed in self.federations if number == self.terms.rounds else ():
            fed.panel.finish()
        self.number = number
        return Round(number, parts=finished)

    def was_observed(self, number: int) -> bool:
        """Return True if an observer looks at a round's updates."""
        return any(fed.was_observed(number) for fed in self.federations)

    @property
    def puts_off(self) -> bool:
        """True if updates of any federation are kept, to be attacked together later."""
        return any(fed.puts_off for fed in self.federations)

    def model(self) -> Params:
        """Return the servers' models; names start with the federation's index."""
        return tree.nest({i: fed.model() for i, fed in enumerate(self.federations)})

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Return everything that the next round depends on, for `load`."""
        states = [fed.state() for fed in self.federations]
        tensors = tree.nest({i: tensors for i, (tensors, _) in enumerate(states)})
        return tensors, {"federations": [data for _, data in states]}

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`."""
        for i, (fed, values) in enumerate(zip(self.federations, data["federations"], strict=True)):
            fed.load(tree.part(tensors, i), values)
        self.number = self.federations[0].number
