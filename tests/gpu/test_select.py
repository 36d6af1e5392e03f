"""The kernel that selects by rank, against the plain path: by Triton's interpreter on a CPU, and as it is on a GPU."""

import importlib.util
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.func import grad, vmap

from secateur import catalogue, tree
from secateur.config import defense
from secateur.defenses import selection
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.selection import keep_between, keep_rows, mask_largest, slices

KINDS = ("smooth", "tied", "zeros", "denormal", "constant", "extreme")
UPLOADS = ("top-k", "dgp", "dgp:release=1", "adgp")
RULES = ("largest", "random", "mix")
CANNOT = 77  # the exit status of an interpreter that cannot run the kernels
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="left out: Triton is not installed, which torch for CUDA brings"
)


def values_of(kind, lanes, entries):
    values = torch.randn(lanes, entries)
    extremes = [math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0, 1e-45, 3.4e38, 1.0]
    return {
        "smooth": values.abs(),
        "tied": (values * 2).round().abs(),
        "zeros": values.abs() * (torch.rand_like(values) < 0.3),
        "denormal": values.abs() * 1e-44,
        "constant": torch.full_like(values, 0.5),
        "extreme": torch.tensor(extremes)[torch.randint(len(extremes), values.shape)],
    }[kind]


def plain(values, lengths, ranks):
    """(lanes, N) int8 bands, each lane by itself on a CPU."""
    found = []
    for lane, row in enumerate(values):
        parts = slices(lengths, row, tuple(map(tuple, ranks[lane % len(ranks)])))
        found.append(sum(part.to(torch.int8) * (number - len(parts)) for number, part in enumerate(parts)) + len(parts))
    return torch.stack(found)


def bands_equal_the_plain_path(device, cases, lengths):
    from secateur.gpu.select import bands

    chance = random.Random(0)
    torch.manual_seed(0)
    for case in range(cases):
        lanes, sizes = chance.choice([1, 1, 3]), tuple(chance.choices(lengths, k=chance.randint(1, 4)))
        values, two = values_of(KINDS[case % len(KINDS)], lanes, sum(sizes)), chance.random() < 0.6
        signed = torch.where(torch.rand_like(values) < 0.5, values, -values)

        def rank(size, two=two):
            first = chance.choice([0, size, chance.randint(0, size)])
            return (first, chance.choice([first, size, chance.randint(first, size)])) if two else (first,)

        ranks = [[rank(size) for size in sizes] for _ in range(chance.choice([1, lanes]))]
        given = torch.tensor(ranks, device=device) if len(ranks) > 1 or case % 2 else tuple(ranks[0])
        # On a GPU only what is asked for somewhere: every other form takes it seconds to compile.
        if device == "cpu" or not two:
            found = bands(values.to(device), sizes, given)
            assert torch.equal(found.cpu(), plain(values, sizes, ranks)), (case, sizes, ranks)
        if two or (device == "cpu" and case % 3 == 0):
            found = bands(signed.to(device), sizes, given, magnitudes=True)
            assert torch.equal(found.cpu(), plain(values.abs(), sizes, ranks)), (case, sizes, ranks)


def rows_keep_what_tensors_keep(device, sizes):
    """Users' tensors at multiples of some number of entries in rows, gaps that hold anything; also one by one."""
    for aligned in (1, 64):
        gaps = [-size % aligned for size in sizes]
        users = [[torch.randn(size).mul(3).round() for size in sizes] for _ in range(3)]
        rows = [
            torch.cat([p for part, gap in zip(user, gaps, strict=True) for p in (part, torch.full((gap,), math.nan))])
            for user in users
        ]
        for top, bottom in ((0.05, 0.75), (0, 0.8)):
            found = keep_rows(torch.stack(rows).to(device), sizes, aligned, top, bottom).cpu()
            for user, row in zip(users, found, strict=True):
                grads = {str(place): part for place, part in enumerate(user)}
                expected = plainly(keep_between, grads, top, bottom).values()
                parts = torch.split(row, [size + gap for size, gap in zip(sizes, gaps, strict=True)])
                for part, wanted, size in zip(parts, expected, sizes, strict=True):
                    assert torch.equal(part[:size], wanted) and not part[size:].any()
                sent = keep_between(tree.to(grads, device), top, bottom)
                assert all(torch.equal(sent[name].cpu(), wanted) for name, wanted in zip(grads, expected, strict=True))


def uploads_in_a_row_are_each_their_own(device):
    """Of tensors that lie elsewhere every time, also at odd addresses; what was sent before stays as it was."""
    expected, found = [], []
    for call in range(3):
        tensors = {
            "conv": torch.randn(4, 3, 3, 3),
            "bias": torch.randn(7),
            "empty": torch.randn(0, 2),
            "one": torch.randn(()),
        }
        expected.append(plainly(keep_between, tensors, 0.05, 0.75))
        there = tree.to(tensors, device)
        if call == 1:
            there["bias"] = torch.cat([there["bias"][:1], there["bias"]])[1:]
        if call == 2:
            there["conv"] = there["conv"].contiguous(memory_format=torch.channels_last)
        found.append(keep_between(there, 0.05, 0.75))
        assert all(torch.equal(there[name].cpu(), value) for name, value in tensors.items())
    for sent, wanted in zip(found, expected, strict=True):
        assert list(sent) == list(wanted)
        assert all(torch.equal(sent[name].cpu(), value) for name, value in wanted.items())


def an_upload_in_inference_mode_can_be_followed_by_others(device):
    grads = {"w": torch.randn(31)}
    expected = plainly(keep_between, grads, 0.05, 0.75)["w"]
    with torch.inference_mode():
        inside = keep_between(tree.to(grads, device), 0.05, 0.75)["w"].cpu()
    outside = keep_between(tree.to(grads, device), 0.05, 0.75)["w"].cpu()
    assert torch.equal(inside, expected) and torch.equal(outside, expected)
    several = torch.stack([grads["w"]] * 2).to(device)
    slope = vmap(grad(lambda one: keep_between({"w": one}, 0.05, 0.75)["w"].square().sum()))(several)
    assert torch.equal(slope.cpu(), torch.stack([2 * expected] * 2))


def plainly(function, *given):
    """By the plain path, whatever the kernel is switched to."""
    before, selection._has_kernel = selection._has_kernel, lambda *values: False
    try:
        return function(*given)
    finally:
        selection._has_kernel = before


def users_are_lanes(device):
    from secateur.gpu.select import bands

    values, ranks = torch.randn(3, 300).to(device), torch.randint(0, 100, (3, 2, 1)).to(device)
    lengths, shared = (180, 120), ((3, 50), (2, 40))
    alone = torch.cat([bands(one[None], lengths, rank[None]) for one, rank in zip(values, ranks, strict=True)])
    assert torch.equal(vmap(lambda one, rank: bands(one[None], lengths, rank[None])[0])(values, ranks), alone)
    assert torch.equal(
        vmap(lambda one: bands(one[None], lengths, shared)[0], in_dims=1)(values.t()), bands(values, lengths, shared)
    )
    one = values[0].expand(3, -1)
    assert torch.equal(vmap(lambda rank: bands(one[:1], lengths, rank[None])[0])(ranks), bands(one, lengths, ranks))
    slope = vmap(grad(lambda one: keep_between({"w": one}, 0.1, 0.6)["w"].square().sum()))(values)
    assert torch.equal(slope, vmap(lambda one: 2 * keep_between({"w": one}, 0.1, 0.6)["w"])(values))
    number = torch.tensor([-2, 7, 300], device=device)
    assert vmap(mask_largest)(values, number).sum(1).tolist() == [0, 7, 300]


def methods_choose_as_on_a_cpu(device, kernel):
    """Every upload and every rule that withholds, one user and three at once; `kernel` switches to the kernel."""
    shapes = {"conv": (8, 2, 3, 3), "bias": (8,), "linear": (10, 21)}
    users = [{name: torch.randn(shape).mul(4).round() for name, shape in shapes.items()} for _ in range(3)]
    for text in UPLOADS:
        upload = upload_of(defense(text))
        expected = []
        for user in users:
            _, state = upload(user, upload.init(user), None)
            expected.append(upload(user, state, None)[0])
        stacked = tree.stack([tree.to(user, device) for user in users])
        with kernel():
            _, state = vmap(lambda one, upload=upload: upload(one, upload.init(one), None))(stacked)
            found, _ = vmap(lambda one, state, upload=upload: upload(one, state, None))(stacked, state)
        assert all(torch.equal(found[name].cpu(), value) for name, value in tree.stack(expected).items()), text
    masks = [{name: torch.rand(shape) < 0.7 for name, shape in shapes.items() if name != "bias"} for _ in users]
    for name in RULES:
        rule = catalogue.find("defense", name)(of="kept")
        noises = [rule.noise(user, torch.Generator().manual_seed(0)) for user in users]
        clients = list(zip(users, users[::-1], masks, noises, strict=True))
        expected = [rule.withheld(*one, noise=noise) for *one, noise in clients]
        stacked = [tree.to(tree.stack(each), device) for each in zip(*clients, strict=True)]
        with kernel():
            found = vmap(lambda w, g, m, n, rule=rule: rule.withheld(w, g, m, noise=n))(*stacked)
        assert all(torch.equal(found[layer].cpu(), value) for layer, value in tree.stack(expected).items()), name


@dataclass
class AsIfOnAGpu:
    """Within it, tensors of a CPU go to the kernel, which the interpreter runs."""

    def __enter__(self):
        self.before, selection._has_kernel = selection._has_kernel, lambda *values: True

    def __exit__(self, *error):
        selection._has_kernel = self.before


class AsItIs(AsIfOnAGpu):
    def __enter__(self):
        self.before = selection._has_kernel


def a_loop_ends_where_a_number_says():
    """Whether this interpreter can count up to a number that it read: with a new numpy an older one cannot."""
    import triton

    global tl
    import triton.language as tl

    @triton.jit
    def counting(number, total):
        counted = 0
        for _ in range(0, tl.load(number), 2):
            counted += 1
        tl.store(total, counted)

    total = torch.zeros(1, dtype=torch.int32)
    try:
        counting[(1,)](torch.full((1,), 5, dtype=torch.int32), total)
    except triton.runtime.errors.InterpreterError:
        return False
    return total.tolist() == [3]


def interpreted():
    from secateur.gpu import select, select_kernels

    if not a_loop_ends_where_a_number_says():
        sys.exit(CANNOT)
    select.EACH, select.TILE, select.PART, select_kernels.LEAST = 256, 128, 64, select_kernels.tl.constexpr(20)
    bands_equal_the_plain_path("cpu", 15, (0, 1, 2, 64, 127, 129, 300))
    with AsIfOnAGpu():
        users_are_lanes("cpu")
        rows_keep_what_tensors_keep("cpu", (300, 1, 64, 127, 257))
        an_upload_in_inference_mode_can_be_followed_by_others("cpu")
        uploads_in_a_row_are_each_their_own("cpu")
    methods_choose_as_on_a_cpu("cpu", AsIfOnAGpu)


def test_rows_without_a_kernel():
    rows_keep_what_tensors_keep("cpu", (300, 1, 64, 127))


@needs_triton
@pytest.mark.system
def test_the_interpreted_kernel_equals_the_plain_path():
    # In a process of its own: Triton reads the variable once, and the interpreter would stay for all that follows.
    here = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    call = [sys.executable, "-c", "import test_select; test_select.interpreted()"]
    done = subprocess.run(
        call, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": here}, capture_output=True, text=True
    )
    if done.returncode == CANNOT:
        pytest.skip("this Triton's interpreter cannot loop up to a number that it read")
    assert done.returncode == 0, done.stderr


@needs_cuda
def test_the_kernel_equals_the_plain_path():
    bands_equal_the_plain_path("cuda", 40, (0, 1, 2, 64, 8191, 8192, 8193, 30_000, 3_000_001))
    users_are_lanes("cuda")
    rows_keep_what_tensors_keep("cuda", (300, 1, 64, 8193, 100_000))
    uploads_in_a_row_are_each_their_own("cuda")
    an_upload_in_inference_mode_can_be_followed_by_others("cuda")
    methods_choose_as_on_a_cpu("cuda", AsItIs)


@needs_cuda
def test_streams_do_not_disturb_each_other():
    streams = [torch.cuda.Stream() for _ in range(2)]
    grads = [{"w": torch.randn(300, 100), "b": torch.randn(64)} for _ in streams]
    there = [tree.to(each, "cuda") for each in grads]
    torch.cuda.synchronize()
    found = []
    for _ in range(8):
        for stream, each in zip(streams, there, strict=True):
            with torch.cuda.stream(stream):
                found.append(keep_between(each, 0.05, 0.75))
    torch.cuda.synchronize()
    expected = [keep_between(each, 0.05, 0.75) for each in grads]
    for sent, wanted in zip(found, expected * 8, strict=True):
        assert all(torch.equal(sent[name].cpu(), value) for name, value in wanted.items())


@needs_cuda
def test_a_graph_holds_it():
    grads = {"w": torch.randn(300, 100, device="cuda"), "b": torch.randn(64, device="cuda")}
    keep_between(grads, 0.05, 0.75)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sent = keep_between(grads, 0.05, 0.75)
    for value in grads.values():
        value.normal_()
    graph.replay()
    expected = keep_between(tree.to(grads, "cpu"), 0.05, 0.75)
    assert all(torch.equal(sent[name].cpu(), value) for name, value in expected.items())
