"""Signed statements of clients: the defense that was applied, and the digest of the update that was sent.

A client signs by the elliptic-curve key of its node (`secateur-key` in the node-config). Without one it makes a key for
the run, whose public half the server remembers from the first round. A signature shows who states something, and that
the message is unchanged. It does not show that the statement is true: a lying client can sign a lie. A few lies are
visible in the update itself (`find_contradiction`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.logger import log

from secateur.defenses.effect import IDLE, cosine
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.interfaces import Params, Upload
from secateur.runs.artifacts import version

RECORD, KEY = "secateur.statement", "secateur.key"  # the record of a reply; the record of a context
NODE_KEY = "secateur-key"  # of the node-config: the file of the node's private key
KEY_ADVICE = "make one with: ssh-keygen -t ecdsa -b 384 -N '' -f FILE"


@dataclass(frozen=True)
class Statement:
    """A client's statement about one update."""

    defense: str  # with all its parameters
    round: int
    run: int
    node: int
    message: str  # the server's message that is answered
    digest: str
    cosine: float  # of the update before and after the defense, to three decimals
    withheld: float  # the share of entries that are 0 after the defense
    secateur: str  # the version

    @property
    def idle(self) -> bool:
        """True if the defense changed nothing, by the client's own figure."""
        return self.cosine >= IDLE


def describe_update(defense: Upload, update: Params, sent: Params, message: Message, number: int) -> dict[str, Any]:
    """Return the fields of a statement that are known before the reply is complete."""
    similarity = round(cosine(update, sent), 3)
    if similarity >= IDLE and not isinstance(defense, SendAll):
        log(WARNING, "%s changed nothing: the sent update has a cosine of %s with the plain one", defense, similarity)
    entries = sum(value.numel() for value in sent.values())
    zeros = sum(int((value == 0).sum()) for value in sent.values())
    return {
        "defense": str(defense),
        "round": number,
        "run": message.metadata.run_id,
        "node": message.metadata.dst_node_id,
        "message": message.metadata.message_id,
        "cosine": similarity,
        "withheld": round(zeros / max(1, entries), 4),
        "secateur": version(),
    }


def digest_of(content: RecordDict) -> str:
    """Return the SHA-256 of a reply's arrays and metrics."""
    hashed = hashlib.sha256()
    for name, record in content.array_records.items():
        for key, array in record.items():
            head = [name, key, array.dtype, list(array.shape), array.stype, len(array.data)]
            hashed.update(json.dumps(head).encode())
            hashed.update(array.data)
    hashed.update(json.dumps({name: dict(record) for name, record in content.metric_records.items()}).encode())
    return hashed.hexdigest()


def sign_reply(reply: Message, fields: dict[str, Any], key: ec.EllipticCurvePrivateKey) -> None:
    """Add the signed statement about a reply to it."""
    text = json.dumps(asdict(Statement(**fields, digest=digest_of(reply.content)))).encode()
    signature = key.sign(text, ec.ECDSA(hashes.SHA256()))
    record: dict[str, Any] = {"statement": text, "key": _public_bytes(key.public_key()), "signature": signature}
    reply.content[RECORD] = ConfigRecord(record)


def read_statement(content: RecordDict) -> tuple[Statement, bytes]:
    """Return the statement in a reply and the public key that signed it; refuse a missing or forged one."""
    if (record := content.config_records.get(RECORD)) is None:
        raise WrongInput("statement", "is missing; the client needs upload_mod as the first of its mods")
    try:
        text, key, signature = (record[name] for name in ("statement", "key", "signature"))
        if not (isinstance(text, bytes) and isinstance(key, bytes) and isinstance(signature, bytes)):
            raise TypeError("no bytes")
        public = serialization.load_der_public_key(key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise ValueError("another kind of key")
        public.verify(signature, text, ec.ECDSA(hashes.SHA256()))
        statement = Statement(**json.loads(text))
        if not isinstance(statement.cosine, float):
            raise TypeError("no number")
    except (KeyError, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, RecursionError) as error:
        raise WrongInput("statement", f"is forged or cannot be read ({type(error).__name__})") from error
    return statement, key


def private_key(context: Context) -> ec.EllipticCurvePrivateKey:
    """Return the key of a client: that of its node, or one for this run, which stays in the client's Context."""
    if NODE_KEY in context.node_config:
        return _load_private(Path(str(context.node_config[NODE_KEY])))
    if KEY not in context.state.config_records:
        new = ec.generate_private_key(ec.SECP384R1())
        plain = serialization.NoEncryption()
        der = new.private_bytes(serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, plain)
        context.state[KEY] = ConfigRecord({"private": der})
    der = bytes(context.state.config_records[KEY]["private"])  # type: ignore[arg-type]
    key = serialization.load_der_private_key(der, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _load_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the elliptic-curve key of a file, as ssh-keygen and openssl write it."""
    try:
        data = path.read_bytes()
        load = serialization.load_ssh_private_key if b"OPENSSH" in data else serialization.load_pem_private_key
        key = load(data, None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise WrongInput(NODE_KEY, f"cannot be read ({type(error).__name__}); {KEY_ADVICE}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise WrongInput(NODE_KEY, f"is of another kind; {KEY_ADVICE}")
    return key


def load_public(path: Path | str) -> bytes:
    """Return the public key of a file, in the form that statements carry."""
    try:
        data = Path(path).read_bytes()
        load = serialization.load_pem_public_key if b"BEGIN" in data else serialization.load_ssh_public_key
        key = load(data)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise WrongInput("keys", f"{path} cannot be read as a public key ({type(error).__name__})") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise WrongInput("keys", f"{path} is of another kind; {KEY_ADVICE}")
    return _public_bytes(key)


def _public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
