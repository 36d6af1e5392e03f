"""A model behind an address that answers JSON: bounded in time, size and tries, and never asked twice about a row."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import WrongInput

ROWS = 32  # in a request
SECONDS = 30.0  # until a request is given up
TRIES = 4
PAUSE = 0.5  # seconds before the second try; doubled before every later one
LARGEST = 1 << 26  # bytes of an answer
NAMED = ("outputs", "predictions", "probabilities", "logits", "scores")
REPEATS = 1e-4  # difference of two answers for one row that rounding explains
RETRIED = (408, 425, 429, 500, 502, 503, 504)

log = logging.getLogger(__name__)


class Endpoint:
    """A model behind an address: POST {"inputs": [...]} is answered by rows of numbers, alone or under a known name.

    Args:
        address: of the model; the request's body is JSON.
        cache: folder of the answers by content of the row, so that a run that was killed does not ask again.
    """

    def __init__(self, address: str, cache: Path | None = None) -> None:
        self.address = address
        self.file = None if cache is None else cache / f"answers-{_digest(address.encode())[:16]}.jsonl"
        self.answers: dict[str, list[float]] = self._load()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the answers for all rows; only rows without a saved answer are asked."""
        if not isinstance(inputs, Tensor):
            raise WrongInput("inputs", "of an endpoint must be one tensor")
        rows = inputs.detach().cpu()
        keys = [_digest(str(row.dtype).encode() + row.contiguous().numpy().tobytes()) for row in rows]
        missing = list({key: place for place, key in enumerate(keys) if key not in self.answers}.items())
        for start in range(0, len(missing), ROWS):
            part = missing[start : start + ROWS]
            asked = [rows[place].tolist() for _, place in part]
            answers = self._ask(asked)
            if not self.answers:
                self._check_repeatable(asked[:2], answers[:2])
            self._save({key: answer for (key, _), answer in zip(part, answers, strict=True)})
        return torch.tensor([self.answers[key] for key in keys], dtype=torch.float64)

    def _ask(self, rows: Sequence[Any]) -> list[list[float]]:
        """Return the answers of one request, tried again where the server may recover."""
        body = json.dumps({"inputs": rows}).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        for attempt in range(TRIES):
            request = urllib.request.Request(self.address, body, headers, method="POST")  # noqa: S310 (http or https)
            try:
                with urllib.request.urlopen(request, timeout=SECONDS) as reply:  # noqa: S310
                    content = reply.read(LARGEST + 1)
                return self._read(content, len(rows))
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {error.reason}"
                if error.code not in RETRIED:
                    break
            except (OSError, TimeoutError) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            log.warning("asking %s again: %s", self.address, problem)
            if attempt + 1 < TRIES:
                time.sleep(PAUSE * 2**attempt)
        raise WrongInput("model", f"{self.address} did not answer ({problem}); start it and run the command again")

    def _check_repeatable(self, asked: list[Any], answers: list[list[float]]) -> None:
        """Refuse a model that answers the same rows otherwise when asked again: saved answers would hide it."""
        pairs = zip(self._ask(asked), answers, strict=True)
        if any(abs(a - b) > REPEATS for again, first in pairs for a, b in zip(again, first, strict=True)):
            raise WrongInput("model", f"{self.address} answers the same input differently when asked again")

    def _read(self, content: bytes, rows: int) -> list[list[float]]:
        """Return the rows of an answer; refuse one that is too large or does not fit."""
        if len(content) > LARGEST:
            raise WrongInput("model", f"{self.address} answers with over {LARGEST >> 20} MiB for {rows} rows")
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise WrongInput("model", f"{self.address} does not answer with JSON") from error
        if isinstance(answer, dict):
            answer = next((answer[name] for name in NAMED if name in answer), None)
        try:
            table = torch.tensor(answer, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            table = torch.empty(0)
        if table.ndim not in (1, 2) or len(table) != rows or not table.numel():
            wanted = f"a list of rows, or one of {', '.join(NAMED)}"
            raise WrongInput("model", f"{self.address} answers {rows} rows by something else than {wanted}")
        return [row if isinstance(row, list) else [row] for row in table.tolist()]

    def _load(self) -> dict[str, list[float]]:
        """Return the saved answers; a last line that was cut off, as by a kill, is left out."""
        answers: dict[str, list[float]] = {}
        text = self.file.read_text() if self.file is not None and self.file.exists() else ""
        for line in text.splitlines():
            try:
                answers |= json.loads(line)
            except ValueError:
                log.warning("asking again the rows of a damaged line of %s", self.file)
        if self.file is not None and text and not text.endswith("\n"):
            self._append("\n")
        return answers

    def _save(self, answers: dict[str, list[float]]) -> None:
        self.answers |= answers
        self._append(json.dumps(answers) + "\n")

    def _append(self, text: str) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as stream:
                stream.write(text)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
