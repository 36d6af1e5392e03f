"""Flower client mods for an existing app: a defense of the update that is sent, and a check of the received model.

Both fail closed. A client whose defense cannot be applied, or that receives a model that it does not accept, sends
nothing of its training. It answers with an error that says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import ERROR
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from torch import Generator, nn

from secateur import tree
from secateur.defenses.soteria import Soteria
from secateur.defenses.uploads import SendAll, find_aligned, inner_of, makes_anew
from secateur.errors import WrongInput
from secateur.federated.faults import read_update
from secateur.federated.flower.link import (
    WIRE,
    arrays_of,
    load_tensors,
    mask_in,
    pack,
    read_tensors,
    single_record,
    size_of,
    store_tensors,
    tensors_of,
    unpack,
)
from secateur.federated.flower.statement import describe_update, private_key, sign_reply
from secateur.interfaces import Batch, Params, Upload, UploadContext
from secateur.seeding import derive
from secateur.wire import encode

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm: sent unchanged
STATE, FORMS = "secateur.upload", "secateur.forms"  # records of a client's Context
DEFENSE = "secateur-defense"  # of the run's config and of a node's
MOST_BYTES = 1 << 32  # of a received model
PARALLEL, FEWEST = 0.99, 8  # an imprint: rows with this cosine, in a matrix of so many rows and columns


def upload_mod(
    defense: Upload | str | None = None,
    *,
    wire: bool = False,
    buffers: tuple[str, ...] = BUFFERS,
    seed: int | None = None,
) -> Mod:
    """Return a client mod that rewrites a client's update: DGP, top-k, error feedback, noise and others.

    The update is received minus trained weights: the gradient, or the sum of several steps. The rewritten update is
    sent as weights again, so that the app's strategy needs no change. Residuals stay in the client's Context. The reply
    has a signed statement (`AgreedStrategy` reads it). Outside the mask of a `PrunedStrategy` nothing is sent.

    The run's config and the node-config may name the defense as `secateur-defense`. All places that name one must name
    the same. If none does, nothing is trained and nothing is sent.

    Args:
        defense: the upload defense, also as text such as dgp:k1=0.05+error-feedback; None: from the configs.
        wire: True to send bytes of the wire format instead of arrays, so that unsent entries cost no bytes. The server
            then needs `DecodingStrategy` around its strategy.
        buffers: suffixes of the names of tensors that are sent unchanged; integer tensors always are.
        seed: makes noise repeatable, for tests only: anyone who knows the seed can subtract the noise.
    """
    return UploadMod(None if defense is None else read_upload(defense), wire, buffers, seed)


@dataclass(frozen=True)
class UploadMod:
    """A client mod with the arguments of `upload_mod`."""

    defense: Upload | None
    wire: bool
    buffers: tuple[str, ...]
    seed: int | None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return the client's reply with a defended update, or an error in its place."""
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        try:  # before anything is trained
            upload, key = choose_upload(self.defense, context), private_key(context)
            received = tensors_of(single_record(message.content, "the message to a client")[1])
            mask = mask_in(message.content, received)
        except Exception as error:
            return refuse(message, error)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        try:
            name, record = single_record(reply.content, "a client's reply")
            trained = tensors_of(record)
            check_tensors("the client's reply", trained, describe_forms(received))
            update, plain = split_update(received, trained, self.buffers)
            update = tree.mask_tree(update, mask)
            state = load_tensors(context.state, STATE) or upload.init(update)
            sent, after = upload(update, state, _context(message, context, received, self.seed))
            sent = tree.mask_tree(sent, mask)
            check_tensors("the defended update", sent, describe_forms(update))
            if self.wire:
                reply.content[name] = pack(update=encode(sent | plain, inside=mask or None))
            else:
                reply.content[name] = arrays_of(apply_update(received, sent | plain, trained, self.buffers))
            sign_reply(reply, describe_update(upload, update, sent, message, round_of(message)), key)
            if after:
                store_tensors(context.state, STATE, after)
        except Exception as error:
            return refuse(message, error)
        return reply


def refuse(message: Message, error: Exception) -> Message:
    """Return the answer of a client that sends nothing: an error with the reason.

    Texts of unexpected exceptions may show data, so they go to the client's own log alone.
    """
    known = isinstance(error, WrongInput)
    if not known:
        log(ERROR, "the defense failed", exc_info=error)
    reason = str(error) if known else f"{type(error).__name__} in the defense; see this client's log"
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"nothing is sent: {reason}"), reply_to=message)


def choose_upload(fixed: Upload | None, context: Context) -> Upload:
    """Return the defense that the app, the node-config and the run's config agree on; refuse none, and two."""
    uploads: dict[str, Upload] = {} if fixed is None else {"the app": fixed}
    for place, config in (("the node-config", context.node_config), ("the run's config", context.run_config)):
        if config.get(DEFENSE, "") != "":
            uploads[place] = read_upload(str(config[DEFENSE]))
    if not uploads:
        raise WrongInput(DEFENSE, "is not set; set it in [tool.flwr.app.config], or give upload_mod a defense")
    if len({str(upload) for upload in uploads.values()}) > 1:
        names = ", ".join(f"{place} has {upload}" for place, upload in uploads.items())
        raise WrongInput(DEFENSE, f"{names}; all must be equal")
    return next(iter(uploads.values()))


def read_upload(defense: Upload | str) -> Upload:
    """Return an upload, also one that is written as in a run file; refuse one that a mod cannot apply."""
    upload = _parse_upload(defense) if isinstance(defense, str) else defense
    check(upload)
    return upload


@lru_cache(maxsize=16)
def _parse_upload(text: str) -> Upload:
    from secateur.config.methods import SENT
    from secateur.config.methods import defense as read_defense
    from secateur.defenses.error_feedback import upload_of

    parsed = read_defense(text)
    for part in parsed.parts:
        if part.name != "none" and (target := part.method.info["acts_on"]) not in SENT:
            raise WrongInput("defense", f"{part.name} acts on {target}, and a mod sees the update alone; use dgp")
    return upload_of(parsed) or SendAll()


def download_mod(
    model: nn.Module | Params | Callable[[], nn.Module] | None = None, *, most_bytes: int = MOST_BYTES
) -> Mod:
    """Return a client mod that refuses models which an honest server does not send, before anything runs on them.

    A model must have the names, shapes and types of the client's own model, finite numbers, and no imprint. An imprint
    is a matrix whose rows are parallel, by which an active server reads single examples (Robbing the Fed). Other
    active attacks change weights in ways that training does too; they are not recognised.

    Args:
        model: the client's own model, or a function that makes it. None: the first received model of a run fixes names,
            shapes and types.
        most_bytes: the most bytes of a model.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            for record in message.content.array_records.values():
                if (size := size_of(record)) > most_bytes:
                    raise WrongInput("model", f"has {size} bytes; this client takes {most_bytes} at most")
                like = _own_tensors(model)
                received = tensors_of(record) if like is None else read_tensors(record, like)
                check_tensors(
                    "model", received, _pin_forms(context, received) if like is None else describe_forms(like)
                )
                check_imprint(received)
        except Exception as error:
            return refuse(message, error)
        return call_next(message, context)

    return mod


def _own_tensors(model: nn.Module | Params | Callable[[], nn.Module] | None) -> Params | None:
    if model is None or isinstance(model, dict):
        return model
    return dict((model if isinstance(model, nn.Module) else model()).state_dict())


def _pin_forms(context: Context, received: Params) -> dict[str, str]:
    """Return the forms of the run's first model."""
    if FORMS not in context.state.config_records:
        context.state[FORMS] = ConfigRecord({"forms": json.dumps(describe_forms(received))})
    return dict(json.loads(str(context.state.config_records[FORMS]["forms"])))


def describe_forms(tensors: Params) -> dict[str, str]:
    """Return the type and the shape of each tensor, as text."""
    return {name: f"{value.dtype} {tuple(value.shape)}" for name, value in tensors.items()}


def check_tensors(field: str, tensors: Params, forms: Mapping[str, str]) -> None:
    """Refuse tensors of other names, types or shapes than these forms, and numbers that are not finite."""
    actual = describe_forms(tensors)
    for name in [*forms, *actual]:
        if actual.get(name) != forms.get(name):
            problem = f"{name} is {actual.get(name, 'missing')} instead of {forms.get(name, 'absent')}"
            raise WrongInput(field, f"{problem}; both sides must use one model")
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise WrongInput(field, f"{name} has numbers that are not finite; check the training")


def check_imprint(model: Params) -> None:
    """Refuse a model with a matrix of parallel rows: each is one of the bins that single examples fall into."""
    for name, value in model.items():
        if value.ndim != 2 or min(value.shape) < FEWEST or not value.is_floating_point():
            continue
        rows = value[value.any(1)].double()
        cosines = torch.nn.functional.cosine_similarity(rows[1:], rows[:-1]).abs()
        if len(cosines) >= FEWEST - 1 and float((cosines >= PARALLEL).double().mean()) > 0.5:
            raise WrongInput(
                "model", f"{name} has parallel rows, an imprint that reads single examples; ask the server"
            )


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
    plain = {name: value for name, value in trained.items() if is_buffer(name, value, buffers)}
    return {n: received[n] - value for n, value in trained.items() if n not in plain}, plain


def apply_update(received: Params, sent: Params, order: Params, buffers: tuple[str, ...] = BUFFERS) -> Params:
    """Return a client's update as weights, received minus update, with the names in the order of `order`."""
    return {
        name: sent[name] if is_buffer(name, received[name], buffers) else received[name] - sent[name] for name in order
    }


def decode_reply(reply: Message, sent: Params, asked: RecordDict) -> None:
    """Replace updates of the wire format in a reply by weights, as a server reads them.

    Args:
        reply: of a client.
        sent: the model that the client was sent.
        asked: the content of the message to the client, which may hold a mask.
    """
    for name, arrays in reply.content.array_records.items():
        if any(array.stype == WIRE for array in arrays.values()):
            update = read_update(unpack(arrays).get("update", b""), sent, mask_in(asked, sent) or None)
            reply.content[name] = arrays_of(apply_update(sent, update, sent))


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
