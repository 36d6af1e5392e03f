"""Sub-model federations over Flower: every client receives only its channels, and returns them trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from flwr.app import ConfigRecord, MessageType, RecordDict
from torch import Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.faults import Fault, Refused, read_update
from secateur.federated.flower.client import load_state, reset_if_other, save_state
from secateur.federated.flower.federation import OverLink, refusing
from secateur.federated.flower.link import SLACK, Link, pack, size_of, unpack
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.clients import SubmodelSent, SubmodelTurn
from secateur.federated.submodels.federation import SubmodelFederation, Turn
from secateur.federated.submodels.structure import SubmodelIndex, flat_of, params_of
from secateur.federated.traffic import Round
from secateur.interfaces import Params
from secateur.wire import decode, decode_mask, encode, encode_mask


class NarrowClients:
    """The clients' side: a federation that knows only the channels of one client, and only while that client trains."""

    def __init__(self, net: nn.Module, data: Dataset, terms: SubmodelSpec, seed: int, device: torch.device) -> None:
        self.federation = SubmodelFederation(net, data, terms, seed, device, execution="sequential")

    def answer(self, content: RecordDict, home: RecordDict) -> RecordDict:
        """Return a client's answer to a message, and update the client's state in its context, `home`."""
        request, fed = content.config_records["turn"], self.federation
        number, client, taken = (int(str(request[name])) for name in ("round", "client", "taken"))
        reset_if_other(home, str(request["key"]))
        cut = fed.broadcast(number, client).cut
        dtypes = dict.fromkeys(cut.shapes, fed.flat.dtype)
        received = decode(unpack(content.array_records["model"])["model"], cut.shapes, dtypes=dtypes)
        fed.flat = torch.zeros_like(fed.flat).index_copy(0, cut.index.to(fed.device), flat_of(received).to(fed.flat))
        state = load_state(home, taken, fed.device)
        fed.states = {} if state is None else {client: state}
        turn = fed.broadcast(number, client)
        (trained,) = fed.trainer([fed._job(number, turn)])
        sent = fed._upload(number, turn, trained)
        if sent.state:
            save_state(home, number, sent.state)
        values = params_of(sent.flat, cut.shapes) if sent.message is None else sent.message
        messages = {"values": encode(values)}
        if sent.covered is not None:
            messages["sent"] = encode_mask(params_of(sent.covered > 0, cut.shapes))
        return RecordDict({"update": pack(**messages)})


class FlowerSubmodels(OverLink, SubmodelFederation):
    """A sub-model federation over a Link."""

    def __init__(self, link: Link, task: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.terms.rule.alone:
            raise WrongInput("submodels", "local sends nothing over flower; use engine here")
        self.connect(link, task, len(self.terms.shares), keeps=self.sender.keeps)

    def run_round(self, number: int) -> Round:
        """Run one round with the clients behind the link."""
        self.begin(number)
        return self._average(number, self._answers(number))

    def _job(self, number: int, turn: Turn) -> SubmodelTurn:
        """Return an empty job, because the server does not train."""
        return SubmodelTurn("", turn.received, [], torch.Generator(), None)

    def _answers(self, number: int) -> Iterator[tuple[Turn, SubmodelSent]]:
        turns = {turn.client: turn for turn in self._turns}
        self.link.greet_nodes()
        for client, answer in self.link.ask(MessageType.TRAIN, self._questions(number, list(turns.values()))):
            try:
                yield turns[client], self._read(answer, turns[client])
            except Refused as refused:
                self.ledger.lose(number, client, refused.fault)

    def _questions(self, number: int, turns: list[Turn]) -> Iterator[tuple[int, RecordDict]]:
        for turn in turns:
            model = pack(model=encode(params_of(turn.received, turn.cut.shapes)))
            request: dict[str, Any] = {"round": number, "client": turn.client, "taken": self.taken.get(turn.client, 0)}
            request |= {"key": self.key, "task": self.task}
            yield turn.client, RecordDict({"model": model, "turn": ConfigRecord(request)})

    def _read(self, answer: RecordDict | Fault, turn: Turn) -> SubmodelSent:
        """Decode and check a client's answer, which is not trusted; raise Refused for a fault."""
        if isinstance(answer, str):
            raise Refused(answer)
        with refusing(turn.client):
            record, cut = answer.array_records["update"], turn.cut
            if size_of(record) > 2 * turn.received.nbytes + SLACK:
                raise Refused("size")
            messages = unpack(record)
            values = read_update(messages.get("values", b""), params_of(turn.received, cut.shapes))
            return self._build_upload(turn, tree.to(values, self.device), self._decode_covered(messages, cut))

    def _decode_covered(self, messages: dict[str, bytes], cut: SubmodelIndex) -> Tensor | None:
        if self.terms.withholding is None:
            return None
        sent = decode_mask(messages.get("sent", b""), cut.shapes)
        cells = {name: torch.ones(shape, dtype=torch.bool) for name, shape in cut.shapes.items()} | sent
        return flat_of(cells).to(self.flat)

    def _build_upload(self, turn: Turn, values: Params, covered: Tensor | None) -> SubmodelSent:
        if self.terms.upload is None:
            return SubmodelSent(flat_of(values), covered, None if covered is None else values, {})
        rate = self.terms.local.learning_rate
        return SubmodelSent(turn.received - rate * flat_of(values), None, values, {})

    def _keep(self, client: int, state: Params) -> None:
        """Record that the server accepted this client's turn; the client itself keeps the state."""
        self.taken[client] = self.number + 1
