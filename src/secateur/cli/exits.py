"""Ends of a command: an exit code and one sentence; an internal error leaves a log with its traceback."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from secateur.errors import WrongInput, printable, shorten


class Exit(IntEnum):
    """Exit codes of every command. Only a passed limit is 1, for build servers."""

    DONE = 0
    LIMIT = 1  # a limit was passed
    WRONG_INPUT = 2
    INCONCLUSIVE = 3  # the evidence does not decide
    FAULT = 70  # internal error or out of memory
    INTERRUPTED = 130  # by Control-C or SIGTERM


UsageError: Any = typer.BadParameter.__mro__[2]  # click's ClickException, or that of the copy inside newer typers
SAVED = "finished stages are saved"
PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EROFS)
INTERRUPTED = f"interrupted; {SAVED}, rerun the same command to resume"


class Fault(Exception):
    """Error that is not the user's, raised from its cause; `folder` is the output of the command, if it has any."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        self.folder = folder


def guard(command: Callable[[], Any]) -> int:
    """Run a command to its end: return its exit code, and print one sentence on stderr unless it succeeded."""
    with _terminated_as_interrupted(), _closed_pipe_ignored(), _plain_logs():
        try:
            code = command()
            if code == Exit.INTERRUPTED:  # typer makes an exit of Control-C
                raise KeyboardInterrupt
            sys.stdout.flush()
            return code if isinstance(code, int) else Exit.DONE
        except (KeyboardInterrupt, typer.Abort):
            end, sentence = Exit.INTERRUPTED, INTERRUPTED
        except WrongInput as error:
            end, sentence = Exit.WRONG_INPUT, str(error)
        except UsageError as error:
            end, sentence = Exit.WRONG_INPUT, error.format_message()
        except Fault as fault:
            end, sentence = _explain(fault.__cause__ or fault, fault.folder)
        except Exception as error:
            end, sentence = _explain(error, None)
        print(f"secateur: {shorten(printable(sentence))}", file=sys.stderr)
        return end


def _explain(error: BaseException, folder: Path | None) -> tuple[Exit, str]:
    """Return the exit code and the sentence for an error that is not the user's."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Exit.WRONG_INPUT, f"out: no space left ({error}); {SAVED}: free some space and rerun the same command"
    if isinstance(error, OSError) and error.errno in PATHS and error.filename is not None:
        problem = f"{printable(os.fsdecode(error.filename))} cannot be used ({error.strerror})"
        return Exit.WRONG_INPUT, f"path: {problem}; {SAVED}: name another one, or make it accessible"
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):  # torch, wherever it trains
        return Exit.WRONG_INPUT, "batch_size: 1 row is too few for a BatchNorm of this model; use at least 2"
    log, message = _write_log(error, folder), " ".join(str(error).split())
    if _ran_out_of_memory(error):
        size = re.search(r"ried to allocate ([\d.]+ \w+)", message)
        what = f"tried to allocate {size[1]}" if size else message.split(". ")[0] or "MemoryError"
        advice = "use a smaller batch, fewer targets, restarts or clients at once, or another device"
        return Exit.FAULT, f"out of memory ({what}); {SAVED}: {advice}; the log is {log}"
    return Exit.FAULT, f"internal error ({type(error).__name__}: {message[:200]}); {SAVED}; the log is {log}"


def _ran_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if "torch" not in sys.modules:
        return False
    from secateur.gpu.memory import ran_out

    return ran_out(error)


def _write_log(error: BaseException, folder: Path | None) -> str:
    """Write the traceback into the run's folder, or into a temporary file where there is none; return its path."""
    lines = [f"command: {' '.join(sys.argv)}\n", f"python: {sys.version}\n", *traceback.format_exception(error)]
    try:
        if folder is not None and (folder / "run.json").is_file():
            path = folder / "fault.log"
            path.unlink(missing_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        else:
            handle, name = tempfile.mkstemp(prefix="secateur-fault-", suffix=".log")
            path = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(lines)
    except OSError as failure:
        return f"lost ({failure.strerror})"
    return str(path)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Control-C, so that rows, pages and locks are left in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # only the main thread may
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _plain_logs() -> Iterator[None]:
    """Print log messages without escapes for the terminal: names in them may come from somebody else."""
    handler = logging.lastResort
    if handler is None:
        yield
        return
    before = handler.formatter
    handler.setFormatter(_PlainFormatter())
    try:
        yield
    finally:
        handler.setFormatter(before)


class _PlainFormatter(logging.Formatter):
    """Formatter of one plain line a message."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)) if record.exc_info is None else super().format(record)


@contextmanager
def _closed_pipe_ignored() -> Iterator[None]:
    """Continue if the reader of stdout or stderr is gone: limits are still checked, and the exit code stays true."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Pipe, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _Pipe:
    """Text stream that reports once that its reader is gone, and then drops the output."""

    def __init__(self, stream: Any) -> None:
        self._stream: Any = stream
        self.encoding = stream.encoding or "utf-8"  # a stream in memory has none

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, unless the reader is gone."""
        try:
            self._guard(lambda: self._stream.write(text))
        except UnicodeEncodeError:  # of a stream that is not UTF-8, such as ASCII
            known = text.encode(self.encoding, errors="backslashreplace").decode(self.encoding)
            self._guard(lambda: self._stream.write(known))
        return len(text)

    def flush(self) -> None:
        """Flush, unless the reader is gone."""
        self._guard(self._stream.flush)

    def _guard(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # for what is buffered, and for the exit
            print("secateur: the reader of the output is gone; the rest is not printed", file=sys.stderr)
