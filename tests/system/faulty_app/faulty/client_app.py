"""Client 1 sends NaN in round 4, a wrong shape in round 5, too much in round 6, and in one round it never ends.

With `lies` set it goes on lying: in every round whose number that divides, each kind in turn.
"""

import time
from pathlib import Path

import torch
from flwr.app import RecordDict

from secateur.federated.flower.app import client_app
from secateur.federated.flower.link import pack
from secateur.models.create import create
from secateur.seeding import derive
from secateur.wire import encode

NAN, SHAPE, SIZE = 4, 5, 6


def spoilt(number):
    """An update of the digits network that is wrong."""
    net = create("digits-cnn", (1, 8, 8), 10, derive(0, "any"))
    values = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    first = next(iter(values))
    if number == NAN:
        values[first] = values[first] + torch.nan
    if number == SHAPE:
        values[first] = torch.zeros(3, 3)
    return encode(values) + (bytes(1 << 22) if number == SIZE else b"")


def misbehave(message, context, call_next):
    reply = call_next(message, context)
    if message.metadata.message_type != "train" or context.node_config["partition-id"] != 1:
        return reply
    number = message.content.config_records["turn"]["round"]
    if number == context.run_config["stuck"]:
        Path(context.run_config["stage"], "stuck").touch()
        time.sleep(3600)
    if every := context.run_config["lies"]:
        number = (NAN, SHAPE, SIZE)[number // every % 3] if number % every == 0 else 0
    if number in (NAN, SHAPE, SIZE):
        reply.content = RecordDict({"update": pack(values=spoilt(number))})
    return reply


app = client_app([misbehave])
