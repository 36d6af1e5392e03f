"""Rounds over sub-models: cut, train, send, average each cell over the clients that trained it (mapp_fl Figure 2).

Read `begin` and `finish` first: `begin` returns the turns of a round, `finish` averages their outputs. In between a
`SubmodelTrainer` trains them, for this federation alone or for several (stacked_federations.py). Random draws depend on
the seed and the round's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.averaging import alive_of
from secateur.federated.faults import NO_ANSWER, Fault, refusal, spoilt
from secateur.federated.federation import Round
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.clients import Narrow, SubmodelResult, SubmodelTrainer, SubmodelTurn, picked
from secateur.federated.submodels.evaluation import SubmodelEvaluation
from secateur.federated.submodels.structure import (
    ClientAndRound,
    Structure,
    SubmodelIndex,
    flat_of,
    narrowed,
    params_of,
    static,
)
from secateur.federated.submodels.uploads import SubmodelSent, SubmodelUpload
from secateur.federated.traffic import Ledger, value_bytes
from secateur.functional import joined
from secateur.interfaces import Batch, Params
from secateur.models.create import check
from secateur.seeding import derive
from secateur.wire import encode


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


Observer = Callable[[SubmodelView], None]


@runtime_checkable
class Remembers(Protocol):
    """An observer with a state, which is saved with the federation."""

    def state(self) -> Params:
        """Return the tensors to save."""
        ...

    def load(self, state: Params) -> None:
        """Resume from the output of `state`."""
        ...


class Turn(NamedTuple):
    """A client's channels in a round, and the model that it is sent."""

    client: int
    cut: SubmodelIndex
    received: Tensor


class SubmodelFederation:
    """A federation over sub-models that can be saved and resumed between two rounds."""

    exact = False  # True: updates are added in float64, as clients answer in any order
    every: float | None = None  # seconds between two checkpoints; None: the default of federated/checkpoint.py
    puts_off = False  # no attack waits for later rounds

    def __init__(
        self,
        net: nn.Module,
        data: Dataset,
        terms: SubmodelSpec,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        observers: Sequence[tuple[int, Observer]] = (),  # each with its period in rounds
        way: str = "auto",
        beside: SubmodelFederation | None = None,  # another federation on this data, whose Crowd is shared
    ) -> None:
        check(net, data.input_shape, data.classes)
        if terms.local.augment is not None:
            terms.local.augment.check(data)
        self.net, self.terms, self.seed, self.device = static(net).to(device), terms, seed, torch.device(device)
        self.observers, self.number = observers, 0  # finished rounds
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
            self.crowd = SubmodelTrainer(self.train, terms.local, way)
        else:
            self.train, self.test, self.crowd = beside.train, beside.test, beside.crowd
        self.judge = SubmodelEvaluation(self.train, self.test, terms)
        self.keys = {rate: self.crowd.add(self._made(rate, data)) for rate in sorted({*self.rates, 1.0})}
        self.sender = SubmodelUpload(terms, self.structure.shapes)
        self.states: dict[int, Params] = {}
        self.ledger = Ledger(len(terms.shares), squares=False)
        self.sizes = Sizes()
        self.owned = [self._owned(rows, data.classes) for rows in terms.shares] if terms.own_labels else None
        self._turns: list[Turn] = []
        self._faults: dict[int, Fault] = {}

    def rounds(self) -> Iterator[Round]:
        """Yield the remaining rounds."""
        while self.number < self.terms.rounds:
            number = self.number + 1
            yield self.finish(number, self.crowd(self.begin(number)))

    def model(self) -> Params:
        """Return the server's model as it is now: a state_dict of copies."""
        return joined(self.net, params_of(self.flat, self.structure.shapes) | dict(self.net.named_buffers()))

    def begin(self, number: int) -> list[SubmodelTurn]:
        """Return the jobs of a round's clients that will answer."""
        terms, rng = self.terms, derive(self.seed, "clients", number)
        count = len(terms.shares)
        clients = sorted(torch.randperm(count, generator=rng)[: terms.per_round or count].tolist())
        steps = [-(-len(terms.shares[client]) // terms.local.batch_size) * terms.local.epochs for client in clients]
        self._faults = {}
        if terms.faults.any:
            self._faults = terms.faults.draw(clients, steps, self.seed, derive(self.seed, "faults", number))
        jobs, self._turns = [], []
        for client in clients:
            turn = self.received(number, client)
            params = params_of(turn.received, turn.cut.shapes)
            self.ledger.traffic.down[client] += self.sizes.model(self.rates[client], params)
            if (fault := self._faults.get(client)) in NO_ANSWER:
                self.ledger.lose(number, client, fault)
                continue
            self._turns.append(turn)
            jobs.append(self._job(number, turn))
        return jobs

    def finish(self, number: int, results: Sequence[SubmodelResult]) -> Round:
        """Average the trained models, and evaluate in evaluation rounds."""
        trained = zip(self._turns, results, strict=True)
        return self._averaged(number, ((turn, self._sent(number, turn, output)) for turn, output in trained))

    def received(self, number: int, client: int) -> Turn:
        """Return the model that a client is sent in a round, and its channels."""
        rate = self.rates[client]
        cut = self.structure.cut(self.terms.rule, ClientAndRound(client, len(self.rates), number), rate)
        return Turn(client, cut, self.flat if rate == 1 else self.flat[cut.index])

    def narrow(self, client: int) -> Narrow:
        """Return the model of a client's width."""
        return self.crowd.narrow[self.keys[self.rates[client]]]

    def observed(self, number: int) -> bool:
        """Return True if an observer looks at the round's updates."""
        return any(number % every == 0 for every, _ in self.observers)

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Return everything that the next round depends on, for `load`: tensors, and plain values."""
        tensors = {"server": self.flat}
        for client, state in self.states.items():
            tensors |= {f"client.{client}.{name}": value for name, value in state.items()}
        for index, observer in self._remembering():
            tensors |= {f"observer.{index}.{name}": value for name, value in observer.state().items()}
        return tensors, {
            "round": self.number,
            "seed": self.seed,
            "ledger": self.ledger.state(),
            "sizes": self.sizes.known,
        }

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`, in a federation of the same terms, data and seed."""
        if data["seed"] != self.seed or tensors["server"].shape != self.flat.shape:
            raise WrongInput("state", "is of another federation; give what one of these terms and this seed kept")
        self.flat, self.states = tensors["server"].to(self.flat), {}
        for name, value in tensors.items():
            if name.startswith("client."):
                _, client, key = name.split(".", 2)
                self.states.setdefault(int(client), {})[key] = value.to(self.device)
        for index, observer in self._remembering():
            prefix = f"observer.{index}."
            observer.load({n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)})
        self.number, self.sizes.known = data["round"], dict(data["sizes"])
        self.ledger.load(data["ledger"])

    def _made(self, rate: float, data: Dataset) -> Narrow:
        scaler = self.terms.scaler
        net = narrowed(self.net, self.structure, rate, scaler, data.input_shape, data.classes)
        return Narrow(net, rate, scaler, self.device)

    def _owned(self, rows: Tensor, classes: int) -> Tensor:
        """Return (K,) 1 for the labels that occur among these rows, else 0."""
        owned = torch.zeros(classes, dtype=self.flat.dtype, device=self.device)
        owned[self.train.labels[rows.to(self.device)]] = 1
        return owned

    def _job(self, number: int, turn: Turn) -> SubmodelTurn:
        client, share = turn.client, self.terms.shares[turn.client]
        rng = derive(self.seed, "rows", number, client)
        epochs = [share[torch.randperm(len(share), generator=rng)] for _ in range(self.terms.local.epochs)]
        picked_epochs = picked(epochs, self.terms.local.augment, derive(self.seed, "augment", number, client))
        noise = Generator(self.device).manual_seed(derive(self.seed, "noise", number, client).initial_seed())
        narrow, _, start = self._begun(number, client)
        return SubmodelTurn(narrow.key, start, picked_epochs, noise, None if self.owned is None else self.owned[client])

    def _begun(self, number: int, client: int) -> tuple[Narrow, SubmodelIndex, Tensor]:
        """Return a client's width and channels in a round, and the model that it begins with."""
        turn = self.received(number, client)
        return self.narrow(client), turn.cut, self.sender.start(turn.received, self._state(client), turn.cut)

    def _state(self, client: int) -> Params:
        return self.states[client] if client in self.states else self.sender.init(self.flat)

    @torch.no_grad()
    def _sent(self, number: int, turn: Turn, result: SubmodelResult) -> SubmodelSent:
        """Return the upload of a client after its training."""
        client = turn.client
        narrow, rng = self.narrow(client), derive(self.seed, "defense", number, client)
        return self.sender(narrow.net, turn.cut, turn.received, result.flat, self._state(client), rng)

    @torch.no_grad()
    def _averaged(self, number: int, sent: Iterable[tuple[Turn, SubmodelSent]]) -> Round:
        """Average the uploads of a round as they arrive, and evaluate in evaluation rounds."""
        last = number == self.terms.rounds
        judged = self.judge.clients(number, partial(self._begun, number)) if last else []  # before the average
        cells = Cells(self.flat, self.exact)
        for turn, upload in sent:
            self._taken(number, turn, upload, cells)
        self.flat = cells.average(self.terms.uncovered)
        self.number, self._turns = number, []
        if not (last or number % self.terms.evaluate_every == 0):
            return Round(number)
        scores = self.judge(self.crowd.narrow[self.keys[1.0]], self.flat, self.terms.shares)
        scores |= {"covered": cells.share, "parameters": float(len(self.flat))}
        return Round(number, self.ledger.measures(number, scores, last) + judged)

    def _taken(self, number: int, turn: Turn, sent: SubmodelSent, cells: Cells) -> None:
        """Add one client's upload to the cells, or note the fault."""
        client, shapes = turn.client, turn.cut.shapes
        values = spoilt(params_of(sent.flat, shapes), self._faults.get(client))
        fault = refusal(values, params_of(turn.received, shapes))
        if fault is None and not bool(alive_of(values if client in self._faults else {"": sent.flat})):
            fault = "nan"
        if fault is not None:
            self.ledger.lose(number, client, fault)
            return
        rate, message = self.rates[client], sent.message
        size = self.sizes.model(rate, values) if message is None else self.sizes.update(rate, message)
        self.ledger.traffic.up[client] += size
        weight = 1.0 if self.terms.averaging == "uniform" else float(len(self.terms.shares[client]))
        covered = sent.covered
        if self.owned is not None:
            label_mask = of_own_labels(self.owned[client], self.structure.outputs, turn.cut)
            covered = label_mask if covered is None else label_mask * covered
        cells.add(turn.cut.index, sent.flat, weight, covered)
        if self.observed(number):
            self._observe(number, turn, sent)  # before `_keep`: the client began with its earlier state
        self._keep(client, sent.state)

    def _observe(self, number: int, turn: Turn, sent: SubmodelSent) -> None:
        client, shapes = turn.client, turn.cut.shapes
        net = self.narrow(client).net
        received, uploaded = (tree.clone(params_of(flat, shapes)) for flat in (turn.received, sent.flat))
        rate, rows = self.rates[client], self.terms.shares[client]
        covered = begun = None
        if sent.covered is not None:
            covered = params_of(sent.covered.bool(), shapes)
            begun = tree.clone(params_of(self._begun(number, client)[2], shapes))
        for every, observer in self.observers:
            if number % every == 0:
                observer(
                    SubmodelView(number, client, rate, net, received, uploaded, turn.cut.channels, rows, covered, begun)
                )

    def _keep(self, client: int, state: Params) -> None:
        """Keep the client's state after a turn that the server took."""
        if state:
            self.states[client] = tree.clone(state)

    def _remembering(self) -> list[tuple[int, Remembers]]:
        observers: list[Any] = [observer for _, observer in self.observers]
        return [(i, observer) for i, observer in enumerate(observers) if isinstance(observer, Remembers)]


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


class Sizes:
    """Bytes of messages in the wire format: of a model by its width, of an update by its values.

    One message of each kind is encoded. The positions of later updates are taken to cost as much as the encoded one's.
    """

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def model(self, rate: float, params: Params) -> int:
        """Return the bytes of a model that keeps this share of the channels."""
        return self._once(f"model {rate}", params, 0)

    def update(self, rate: float, message: Params) -> int:
        """Return the bytes of an update that is 0 where nothing is sent."""
        values = value_bytes(message)
        return values + self._once(f"positions {rate}", message, values)

    def _once(self, key: str, message: Params, less: int) -> int:
        if key not in self.known:
            self.known[key] = len(encode(tree.to(message, "cpu"))) - less
        return self.known[key]
