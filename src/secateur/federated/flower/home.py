"""What a client keeps in its Context between two rounds: its state, and the server's mask."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict

from secateur import tree
from secateur.errors import WrongInput
from secateur.federated.flower.records import keep, kept, packed, unpacked
from secateur.interfaces import Mask, Params
from secateur.wire import decode_mask

HOME = "secateur.home"  # of the records in a client's context: whose state it is, and of which rounds
STATE, BEFORE, MASK = "secateur.state", "secateur.before", "secateur.mask"


def settle(home: RecordDict, key: str) -> None:
    """Forget what was kept for another federation."""
    if HOME not in home.config_records or home.config_records[HOME]["key"] != key:
        for name in list(home):
            del home[name]
        home[HOME] = ConfigRecord({"key": key, STATE: 0, BEFORE: 0, MASK: -1})


def mask_of(home: RecordDict, sent: bytes | None, version: int, shapes: dict[str, tuple[int, ...]]) -> Mask:
    """The mask of a version: sent with the message, or kept from an earlier one."""
    if version < 0:
        return {}
    told: Any = home.config_records[HOME]
    if sent is not None:
        home[MASK] = packed(mask=sent)
        told[MASK] = version
    if told[MASK] != version:
        raise WrongInput("mask", "of this round was never received here")
    return decode_mask(unpacked(home.array_records[MASK])["mask"], shapes)


def last(home: RecordDict, taken: int, device: torch.device) -> Params | None:
    """The state after the round whose update the server took last; a turn that it did not take never was."""
    told = home.config_records[HOME]
    for name in (STATE, BEFORE):
        if told[name] == taken and taken:
            found = kept(home, name)
            return None if found is None else tree.to(found, device)
    return None


def remember(home: RecordDict, number: int, state: Params) -> None:
    """Keep the state after this round, and the one before it, in case that the server does not take this turn."""
    told: Any = home.config_records[HOME]
    if told[STATE] != number and STATE in home:
        home[BEFORE] = home.array_records[STATE]
        told[BEFORE] = told[STATE]
    keep(home, STATE, state)
    told[STATE] = number
