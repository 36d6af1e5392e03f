"""Mutations of valid inputs, and a loop that tries many: an answer or a WrongInput, within bounds of memory and time.

A case is drawn from the seed, the target's name and the case's number alone, so each can be tried again by its number.
"""

import json
import mmap
import os
import resource
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from secateur.errors import WrongInput

SLACK = 192 << 20  # bytes that a reader may take beyond twice the file: an archive's 16 MiB, a picture of 2^24 pixels
MOST = 2 << 30  # bytes of address space that a process of cases may add: more is a MemoryError, not a dead machine
SECONDS = 20  # of one case
TOGETHER = 20  # cases between two measurements of memory
EXTREME = [0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**63 - 1]
TOKENS = (
    *(b"NaN", b"1e999", b"-1e999", b"1e-320", b"-0.0", b"99999999999999999999", b"9" * 400, b"null", b"true", b"[]"),
    *(b"{}", b'"', b"'", b",", b":", b"\n", b"\r", b"\0", b"\xff\xfe", b"\x1b[2J", b"../", b"/", b"<script>", b"%s"),
    *(b"\xe2\x80\xae", b"\xed\xa0\x80", b"[" * 40, b"{" * 40, b"#", b"-", b".", b"e", b"1.5", b"0x10", b"1_000"),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1.5, -0.0, 1e300, float("nan"), float("inf"), "", "x", "NaN"),
    *("1e999", "\x1b[31m", "<script>alert(1)</script>", "\ud800", "a" * 5000, [], [None], [[]], [1, [2]], {}),
    *({"a": {}}, {"": 0}, ["x"] * 50, [0.5, "y"], {"kind": 3}, "\0", "%s", "{{7*7}}", "0", "-1"),
)


def mutate(draw: Random, content: bytes, other: bytes = b"", tokens: tuple[bytes, ...] = TOKENS) -> bytes:
    """Return the content with one to four changes; `other` is a second valid input, of which parts are taken."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
        draw.choice(CHANGES)(draw, changed, other, tokens)
    return bytes(changed)


def _span(draw, content):
    """Return the ends of a part, mostly a short one."""
    start = draw.randrange(len(content) + 1)
    return start, min(len(content), start + draw.choice((1, 2, 4, 8, 30, len(content))))


def _flip(draw, content, other, tokens):
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _byte(draw, content, other, tokens):
    if content:
        content[draw.randrange(len(content))] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))


def _cut(draw, content, other, tokens):
    del content[draw.randrange(len(content) + 1) :]


def _delete(draw, content, other, tokens):
    start, end = _span(draw, content)
    del content[start:end]


def _insert(draw, content, other, tokens):
    start = draw.randrange(len(content) + 1)
    content[start:start] = draw.randbytes(draw.choice((1, 2, 8, 100)))


def _duplicate(draw, content, other, tokens):
    start, end = _span(draw, content)
    content[end:end] = content[start:end] * (1 if end - start > 1000 else draw.choice((1, 1, 2, 50)))


def _swap(draw, content, other, tokens):
    (a, b), (c, d) = sorted((_span(draw, content), _span(draw, content)))
    if b <= c:
        content[a:d] = content[c:d] + content[b:c] + content[a:b]


def _splice(draw, content, other, tokens):
    start, end = _span(draw, other)
    content[draw.randrange(len(content) + 1) :] = other[start:end] if draw.random() < 0.3 else other[start:]


def _number(draw, content, other, tokens):
    code = draw.choice("bhiq")
    value = draw.choice(EXTREME) + draw.choice((0, 0, 1, -1))
    packed = (value % 2 ** (8 * struct.calcsize(code))).to_bytes(struct.calcsize(code), draw.choice(("little", "big")))
    start = draw.randrange(len(content) + 1)
    content[start : start + len(packed)] = packed


def _token(draw, content, other, tokens):
    start, end = _span(draw, content)
    content[start : draw.choice((start, start, end))] = draw.choice(tokens)


CHANGES = (_flip, _byte, _byte, _cut, _delete, _insert, _duplicate, _swap, _splice, _number, _number, _token, _token)


def mutate_json(draw: Random, value: object) -> object:
    """Return a JSON value with one part replaced, dropped, repeated or renamed."""
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        copied = dict(value) if isinstance(value, dict) else list(value)
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        act = draw.random()
        if act < 0.7:
            copied[key] = mutate_json(draw, value[key])
        elif act < 0.85:
            del copied[key]
        elif isinstance(copied, dict):
            copied[draw.choice((*value, "x", "", "schema", "kind"))] = copied.pop(key)
        else:
            copied.insert(key, draw.choice((value[key], draw.choice(VALUES))))
        return copied
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.5:
        return draw.choice((-value, value + 1, value * 1e18, value / 3, str(value), [value]))
    return draw.choice(VALUES)


def mutate_lines(draw: Random, content: bytes, other: bytes = b"") -> bytes:
    """Return a JSONL text with a change inside of a line's value, or in its bytes."""
    lines = content.splitlines()
    if not lines or draw.random() < 0.25:
        return mutate(draw, content, other)
    for _ in range(draw.choice((1, 1, 2, 5))):
        number = draw.randrange(len(lines))
        try:
            lines[number] = json.dumps(mutate_json(draw, json.loads(lines[number]))).encode()
        except ValueError:
            lines[number] = mutate(draw, lines[number])
    return b"\n".join(lines) + b"\n"


class Target(NamedTuple):
    """Something that reads inputs of others."""

    name: str
    seeds: list[bytes]  # valid inputs
    read: Callable[[bytes], object]
    forge: Callable[[Random, bytes, bytes], bytes] = mutate
    share: int = 1  # of the cases of a long run


class Late(BaseException):
    """A case that took too long; no reader catches it."""


def case_of(target: Target, seed: int, number: int) -> bytes:
    """Return the input of a case; the first ones are the valid inputs themselves."""
    if number < len(target.seeds):
        return target.seeds[number]
    draw = Random(f"{seed}/{target.name}/{number}")
    return target.forge(draw, draw.choice(target.seeds), draw.choice(target.seeds))


def try_case(target: Target, content: bytes) -> str:
    """Return "read" or "refused"; another end of the reader is raised."""
    try:
        target.read(content)
    except WrongInput as error:
        message = str(error)
        assert len(message) < 9_000, f"a message of {len(message)} characters"
        return "refused"
    return "read"


def _late(number, frame):
    raise Late(f"took more than {SECONDS} s")


def _address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _memory(reset=False):
    """Return the highest memory since the last reset, in bytes."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS" if reset else "VmHWM"))


def describe(error: BaseException) -> str:
    """Return an error in one line: its type, its message and the last place in the package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/secateur/" in frame.filename]
    place = f" at {frames[-1].filename.rpartition('/secateur/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:120]!r}{place}"


def _work(target, seed, numbers, current, out):
    """Try cases in this process, and write a line for each failure; `current` tells which case a crash was in.

    Memory is measured over some cases at a time, as a measurement takes as long as a short case.
    """
    signal.signal(signal.SIGALRM, _late)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MOST,) * 2)
    counts = Counter()
    for start in range(0, len(numbers), TOGETHER):
        largest, before = 0, _memory(reset=True)
        for number in numbers[start : start + TOGETHER]:
            struct.pack_into("<q", current, 0, number)
            content = case_of(target, seed, number)
            largest = max(largest, len(content))
            signal.alarm(SECONDS)
            try:
                counts[try_case(target, content)] += 1
            except (Exception, Late) as error:
                _note(out, target, number, describe(error))
            signal.alarm(0)
        if (more := _memory() - before) > 2 * largest + SLACK:
            counts["refused"] -= 1
            _note(out, target, number, f"{more >> 20} MiB for at most {largest} bytes, in one of the last {TOGETHER}")
        struct.pack_into("<qq", current, 8, counts["read"], counts["refused"])


def _note(out, target, number, error):
    out.write(json.dumps({"target": target.name, "case": number, "error": error}) + "\n")


def run_cases(target: Target, seed: int, first: int, count: int, out: str) -> Counter:
    """Try cases in a child process, which is replaced if it crashes; append failures to the file `out`."""
    counts, end, current = Counter(), first + count, mmap.mmap(-1, 24)
    while first < end:
        struct.pack_into("<qqq", current, 0, first, 0, 0)
        child = os.fork()
        if not child:
            code = 1
            try:
                with open(out, "a", buffering=1) as file:
                    _work(target, seed, range(first, end), current, file)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        number, answered, refused = struct.unpack("<qqq", current[:24])
        counts["read"] += answered
        counts["refused"] += refused
        if status == 0:
            break
        ended = os.waitstatus_to_exitcode(status)
        with open(out, "a") as file:
            _note(file, target, number, f"crashed with {ended}")
        counts["crashed"] += 1
        first = number + 1
    counts["cases"] = count
    return counts
