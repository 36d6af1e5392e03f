"""A Flower client mod that adds an update defense to an existing app in one line."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Generator, nn

from secateur.defenses.soteria import Soteria
from secateur.defenses.uploads import find_aligned, inner_of, makes_anew
from secateur.errors import WrongInput
from secateur.federated.flower.link import arrays_of, load_tensors, pack, single_record, store_tensors, tensors_of
from secateur.interfaces import Batch, Params, Upload, UploadContext
from secateur.seeding import derive
from secateur.wire import encode

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm: sent unchanged
STATE = "secateur.upload"


def upload_mod(
    defense: Upload, *, wire: bool = False, buffers: tuple[str, ...] = BUFFERS, seed: int | None = None
) -> Mod:
    """Return a client mod that rewrites a client's update: DGP, top-k, error feedback, noise and others.

    The update is received minus trained weights: the gradient, or the sum of several steps. The rewritten update is
    sent as weights again, so that the app's strategy needs no change. Residuals stay in the client's Context.

    Args:
        defense: the upload defense.
        wire: True to send bytes of the wire format instead of arrays, so that unsent entries cost no bytes. The server
            then needs `DecodingStrategy` around its strategy.
        buffers: suffixes of the names of tensors that are sent unchanged; integer tensors always are.
        seed: makes noise repeatable, for tests only: anyone who knows the seed can subtract the noise.
    """
    check(defense)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        received = tensors_of(single_record(message.content, "the message to a client")[1])
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        name, record = single_record(reply.content, "a client's reply")
        trained = tensors_of(record)
        update, plain = split_update(received, trained, buffers)
        state = load_tensors(context.state, STATE) or defense.init(update)
        sent, after = defense(update, state, _context(message, context, received, seed))
        if after:
            store_tensors(context.state, STATE, after)
        if wire:
            reply.content[name] = pack(update=encode(sent | plain))
        else:
            reply.content[name] = arrays_of(apply_update(received, sent | plain, trained, buffers))
        return reply

    return mod


def check(defense: Upload) -> None:
    """Raise WrongInput for a defense that needs more than a mod can see."""
    name = type(inner_of(defense)).__name__
    if find_aligned(defense) is not None:
        raise WrongInput("defense", f"{name} lets one client choose the positions of all; use dgp")
    if isinstance(inner_of(defense), Soteria) or makes_anew(defense):
        raise WrongInput("defense", f"{name} needs the examples of an update, which a mod does not see; use another")


def is_buffer(name: str, value: torch.Tensor, buffers: tuple[str, ...]) -> bool:
    """Return True if a tensor is sent unchanged."""
    return not value.is_floating_point() or name.endswith(buffers)


def split_update(received: Params, trained: Params, buffers: tuple[str, ...] = BUFFERS) -> tuple[Params, Params]:
    """Return the update, received minus trained, and the tensors that are sent unchanged."""
    if received.keys() != trained.keys():
        raise WrongInput("arrays", "the client's reply has other names than the received model; they must be equal")
    plain = {name: value for name, value in trained.items() if is_buffer(name, value, buffers)}
    return {n: received[n] - value for n, value in trained.items() if n not in plain}, plain


def apply_update(received: Params, sent: Params, order: Params, buffers: tuple[str, ...] = BUFFERS) -> Params:
    """Return a client's update as weights, received minus update, with the names in the order of `order`."""
    return {
        name: sent[name] if is_buffer(name, received[name], buffers) else received[name] - sent[name] for name in order
    }


def _context(message: Message, context: Context, received: Params, seed: int | None) -> UploadContext:
    number = round_of(message)
    no_examples = Batch(torch.empty(0), torch.empty(0, dtype=torch.int64))
    if seed is None:
        rng = Generator()
        rng.seed()
    else:
        rng = derive(seed, "upload", number, int(context.node_config.get("partition-id", context.node_id)))
    return UploadContext(nn.Identity(), received, no_examples, number, rng)


def round_of(message: Message) -> int:
    """Return the round of a message, which Flower's strategies write into its configuration; 0 if absent."""
    numbers: list[Any] = [
        record["server-round"] for record in message.content.config_records.values() if "server-round" in record
    ]
    return int(numbers[0]) if numbers else 0
