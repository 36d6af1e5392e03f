"""Sparse updates and masks as bytes: equal after the way, small, and refused in one sentence when broken."""

from __future__ import annotations

import math
import resource
import struct
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from secateur.errors import WrongInput
from secateur.wire import decode, decode_mask, encode, encode_mask
from secateur.wire.message import largest_message
from secateur.wire.positions import entropy
from secateur.wire.table import DTYPES, HEAD, Coding, TableEntry, TensorTable, pack, unpack

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def sparse(shape: tuple[int, ...], density: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=rng) < density
    if dtype in INTEGERS:
        return torch.randint(1, 100, shape, generator=rng).to(dtype) * kept
    return torch.where(kept, torch.randn(shape, generator=rng).to(dtype), torch.zeros((), dtype=dtype))


def exactly(size: int, density: float, seed: int = 0) -> Tensor:
    """A mask with exactly so many entries."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return order < round(density * size)


def shapes_of(update: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in update.items()}


def bits_of(value: Tensor) -> bytes:
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.dtype.itemsize]
    return value.detach().contiguous().view(words).numpy().tobytes()


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Equal in names, order, dtype, shape and every bit."""

    def described(tree: dict[str, Tensor]) -> list[tuple[object, ...]]:
        return [(name, value.dtype, value.shape, bits_of(value)) for name, value in tree.items()]

    return described(found) == described(wanted)


def table_of(data: bytes, shapes: dict[str, tuple[int, ...]]) -> TensorTable:
    return unpack(data[HEAD : HEAD + int.from_bytes(data[9:HEAD], "little")], shapes)


def codings(update: dict[str, Tensor]) -> list[Coding]:
    return [entry.coding for entry in table_of(encode(update), shapes_of(update)).entries]


def sealed(body: bytes, version: int = 1) -> bytes:
    """A message with a right checksum, whatever is in it."""
    return b"SCTR" + bytes([version]) + struct.pack("<I", zlib.crc32(body)) + body


def forged(table: TensorTable, rest: bytes) -> bytes:
    packed = pack(table)
    return sealed(struct.pack("<I", len(packed)) + packed + rest)


# There and back --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("density", [0.0, 0.003, 0.2, 0.5, 0.97, 1.0])
def test_every_dtype_and_density_arrives_bit_for_bit(dtype, density):
    update = {"w": sparse((40, 9, 7), density, dtype), "b": sparse((3,), density, dtype, 1)}
    assert same(decode(encode(update), shapes_of(update)), update)


def test_scalars_empty_tensors_strides_and_no_tensors_at_all():
    wide = sparse((64, 50), 0.3)
    update = {"scalar": torch.tensor(2.5), "zero": torch.tensor(0.0), "empty": torch.empty(0, 3), "strided": wide.T}
    assert same(decode(encode(update), shapes_of(update)), update)
    assert decode(encode({}), {}) == {}


def test_nan_payloads_and_infinities_survive_and_minus_zero_is_zero():
    bits = torch.tensor([0x7FC00001, 0x7F800123, -1, 0x7F800000, 1, 0, -(2**31)], dtype=torch.int32)
    for repeats in (1, 3000):  # dense among few entries, coded among many
        value = torch.cat([bits, torch.zeros(repeats, dtype=torch.int32)]).view(torch.float32)
        found = decode(encode({"w": value}), {"w": tuple(value.shape)})["w"].view(torch.int32)
        assert found[:6].tolist() == bits[:6].tolist()
        assert not found[6:].any()


def test_the_receiver_decides_the_order():
    update = {"b": torch.ones(2), "a": torch.zeros(3)}
    assert list(decode(encode(update), {"a": (3,), "b": (2,)})) == ["a", "b"]


def test_nothing_given_is_changed_and_gradients_are_taken():
    value = sparse((100,), 0.5)
    copy = value.clone()
    assert torch.equal(decode(encode({"w": value.requires_grad_()}), {"w": (100,)})["w"], copy)


def test_each_coding_is_taken_where_it_is_the_cheapest():
    runs = (torch.arange(80_000) // 4_000 % 2).float()
    assert codings({"none": torch.zeros(9), "all": torch.ones(9)}) == [Coding.EVIDENT] * 2
    assert codings(
        {"few are zero": torch.cat([torch.ones(900, dtype=torch.int8), torch.zeros(1, dtype=torch.int8)])}
    ) == [Coding.DENSE]
    assert codings({"short": sparse((64,), 0.5)}) == [Coding.BITMAP]
    assert codings({"half": exactly(80_000, 0.5).float()}) == [Coding.BITMAP]
    assert codings({"runs": runs}) == [Coding.DEFLATED]
    assert codings({"one in a hundred": sparse((80_000,), 0.01)}) == [Coding.GAPS]
    assert codings({"fifth": sparse((80_000,), 0.2)}) == [Coding.ENTROPY]


@quick
@given(st.data())
def test_any_tree_comes_back(data):
    shape = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    update = {}
    for name in data.draw(st.lists(st.text(max_size=8), unique=True, max_size=4)):
        dtype, density = data.draw(st.sampled_from([*FLOATS, *INTEGERS])), data.draw(st.floats(0, 1))
        update[name] = sparse(data.draw(shape), density, dtype, data.draw(st.integers(0, 99)))
        update[name] = torch.where(update[name] != 0, update[name], 0)  # no -0.0
    inside = {name: torch.rand(value.shape) < 0.5 for name, value in update.items() if data.draw(st.booleans())}
    assert same(decode(encode(update), shapes_of(update)), update)
    held = {name: torch.where(inside[name], value, 0) if name in inside else value for name, value in update.items()}
    assert same(decode(encode(held, inside=inside), shapes_of(update), inside=inside), held)


# Sizes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("density", [0.01, 0.05, 0.2, 0.5, 0.9, 0.99])
def test_positions_are_within_two_per_cent_of_their_entropy(density):
    mask = {"w": exactly(400_000, density)}
    bits, count = 8 * len(encode_mask(mask)), int(mask["w"].sum())
    least = math.lgamma(400_001) - math.lgamma(count + 1) - math.lgamma(400_001 - count)  # ln of the binomial
    assert least / math.log(2) <= bits <= 1.02 * entropy(400_000, count)


def test_a_tenth_of_a_per_mille_still_costs_its_entropy():
    mask = {"w": exactly(2_000_000, 1e-4)}
    assert 8 * len(encode_mask(mask)) <= 1.02 * entropy(2_000_000, 200) + 8 * 40  # 2 946 bits, and the table


def test_a_real_structure_is_never_worse_than_a_bitmap():
    mask = {"w": exactly(8_000, 0.5) | (torch.arange(8_000) < 2_000)}
    assert len(encode_mask(mask)) <= 1_000 + 40


def test_values_cost_their_bytes():
    update = {"w": sparse((100_000,), 0.2, torch.float16)}
    count = int(update["w"].count_nonzero())
    positions = entropy(100_000, count) / 8
    assert 2 * count + positions <= len(encode(update)) + 8 <= 2 * count + 1.01 * positions + 100


# Inside a mask ---------------------------------------------------------------------------------------------------
def test_positions_inside_a_mask_cost_only_what_they_choose_there():
    inside = {"w": exactly(100_000, 0.4)}
    update = {
        "w": torch.where(
            inside["w"] & (torch.rand(100_000, generator=torch.Generator().manual_seed(1)) < 0.5), 1.0, 0.0
        )
    }
    data = encode(update, inside=inside)
    assert same(decode(data, {"w": (100_000,)}, inside=inside), update)
    assert len(data) <= 4 * int(update["w"].sum()) + 40_000 / 8 + 60


def test_an_update_outside_of_its_mask_is_refused_not_lost():
    with pytest.raises(WrongInput, match="w has entries outside of the broadcast positions"):
        encode({"w": torch.ones(4)}, inside={"w": torch.tensor([True, True, False, True])})


@pytest.mark.parametrize("mask", [torch.ones(5, dtype=torch.bool), torch.ones(4)])
def test_a_mask_that_does_not_fit_is_refused(mask):
    data = encode({"w": torch.ones(4)}, inside={"w": torch.ones(4, dtype=torch.bool)})
    for call in (
        lambda: encode({"w": torch.ones(4)}, inside={"w": mask}),
        lambda: decode(data, {"w": (4,)}, inside={"w": mask}),
    ):
        with pytest.raises(WrongInput, match="inside"):
            call()


def test_a_message_is_read_with_the_mask_it_was_written_with():
    inside = {"w": torch.tensor([True, True, False, False])}
    data = encode({"w": torch.tensor([1.0, 0, 0, 0])}, inside=inside)
    for other in (None, {}, {"w": torch.tensor([True, False, True, False])}):
        with pytest.raises(WrongInput, match="not the mask that the message was encoded with"):
            decode(data, {"w": (4,)}, inside=other)


# Masks -----------------------------------------------------------------------------------------------------------
def test_masks_travel_as_bits_and_name_what_they_name():
    mask = {"a": exactly(1_000, 0.3), "b": torch.ones(4, 2, dtype=torch.bool), "c": torch.zeros(3, dtype=torch.bool)}
    found = decode_mask(encode_mask(mask), {"bias": (7,)} | shapes_of(mask))
    assert same(found, mask)
    assert len(encode_mask(mask)) < 1_000 / 8 + 70


def test_a_mask_is_bool():
    with pytest.raises(WrongInput, match=r"mask: w is torch.float32; must be bool"):
        encode_mask({"w": torch.ones(3)})
    with pytest.raises(WrongInput, match=r"message: w is torch.float32; must be bool"):
        decode_mask(encode({"w": torch.ones(3)}), {"w": (3,)})


# Broken messages -------------------------------------------------------------------------------------------------
UPDATE = {
    "entropy": sparse((30, 100), 0.2),
    "all": torch.ones(10),
    "gaps": sparse((9_999,), 0.01),
    "runs": (torch.arange(9_000) // 1_000 % 2).to(torch.int8),
    "dense": torch.cat([torch.ones(300), torch.zeros(1)]).to(torch.int8),
    "bitmap": exactly(512, 0.5),
}
SHAPES = shapes_of(UPDATE)
DATA = encode(UPDATE)
VALUES = struct.pack("<2f", 1.0, 2.0)


def test_what_is_fuzzed_has_every_coding():
    assert set(codings(UPDATE)) == set(Coding)


def entry(**changes: object) -> TableEntry:
    right = {"name": "w", "dtype": torch.float32, "shape": (9,), "count": 2, "coding": Coding.BITMAP, "bytes": 2}
    return TableEntry(**(right | changes))


def refused(data: bytes, sentence: str, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
    with pytest.raises(WrongInput, match=sentence) as caught:
        decode(data, shapes or {"w": (9,)})
    assert "\n" not in str(caught.value)


def test_the_forged_messages_below_would_be_right_without_their_change():
    assert decode(forged(TensorTable(None, 0, (entry(),)), b"\xc0\x00" + VALUES), {"w": (9,)})["w"][:3].tolist() == [
        1,
        2,
        0,
    ]


@pytest.mark.parametrize(
    ("change", "rest", "sentence"),
    [
        ({"count": 3}, b"\xc0\x00" + VALUES + VALUES[:4], "has 2 positions, but its count is 3"),
        ({"count": 10}, b"\xc0\x00" + VALUES, "wrong count: 10 of 9"),
        ({}, b"\x80\x40" + VALUES, "position out of range; it has 9 entries"),
        ({}, b"\xc0\x00" + VALUES[:7], "its table asks for 10"),
        ({}, b"\xc0\x00" + VALUES + b"\0", "has 11 bytes of positions and values"),
        ({}, b"\xc0\x00" + VALUES[:4] + bytes(4), "has 1 entries that are not 0, but its count is 2"),
        ({"bytes": 3}, b"\xc0\x00\x00" + VALUES, "has 3 bytes of positions; 2 are right"),
        ({"coding": Coding.EVIDENT, "bytes": 0}, VALUES, "coding that does not fit its count"),
        ({"coding": Coding.DENSE, "bytes": 0}, VALUES[:4] + bytes(32), "has 1 entries that are not 0"),
        ({"dtype": torch.bool, "coding": Coding.DENSE, "bytes": 0}, b"", "mask without positions"),
        ({"coding": Coding.ENTROPY, "bytes": 0}, VALUES, "contradict each other"),
        ({"coding": Coding.GAPS, "bytes": 0}, VALUES, "positions of w are cut off"),
        ({"coding": Coding.GAPS, "bytes": 1}, b"\x09" + VALUES, "positions of w are cut off"),
        ({"coding": Coding.GAPS, "bytes": 1}, b"\x7f" + VALUES, "positions of w are cut off"),
        ({"coding": Coding.GAPS, "bytes": 1}, b"\x00" + VALUES, "has 0 positions in its gaps; 2 are right"),
        ({"coding": Coding.GAPS, "bytes": 2}, b"\x00\x80" + VALUES, "has 1 positions in its gaps; 2 are right"),
        ({"coding": Coding.GAPS, "bytes": 3}, b"\x00\x80\x01" + VALUES, "position out of range"),
        ({"coding": Coding.GAPS, "bytes": 3}, b"\x02\x00\x30" + VALUES, "position out of range"),
        ({"coding": Coding.GAPS, "bytes": 3}, b"\x03\xfc\xc0" + VALUES, "position out of range"),
        ({"coding": Coding.DEFLATED, "bytes": 2**62}, VALUES, "asks for"),
        ({"coding": Coding.DEFLATED, "bytes": 4}, b"abcd" + VALUES, "cannot be inflated"),
        ({"shape": (3, 3)}, b"\xc0\x00" + VALUES, r"has the shape \(3, 3\); \(9,\) is expected"),
        ({"shape": (2**60, 2**60)}, b"\xc0\x00" + VALUES, "is expected"),
        ({"name": "v"}, b"\xc0\x00" + VALUES, "holds v, which is not expected"),
        ({"name": "v\nall is well"}, b"\xc0\x00" + VALUES, r"holds 'v\\nall is well', which is not expected"),
    ],
)
def test_a_forged_table_is_refused(change, rest, sentence):
    refused(forged(TensorTable(None, 0, (entry(**change),)), rest), sentence)


def test_tensors_that_are_twice_too_many_or_missing():
    twice = TensorTable(None, 0, (entry(), entry()))
    refused(forged(twice, b""), "holds w twice", {"w": (9,), "v": (9,)})
    refused(forged(twice, b""), "holds 2 tensors; 1 are expected")
    refused(forged(TensorTable(None, 0, ()), b""), "lacks w")


def test_bombs_stay_small():
    bomb = zlib.compress(bytes(50_000_000), 9)
    refused(sealed(struct.pack("<I", len(bomb)) + bomb), r"has \d+ bytes; one of these shapes has at most")
    bomb = zlib.compress(bytes(20_000), 9)
    refused(sealed(struct.pack("<I", len(bomb)) + bomb), "its table inflates to more than")
    coded = entry(coding=Coding.DEFLATED, bytes=len(bomb))
    refused(forged(TensorTable(None, 0, (coded,)), bomb + VALUES), "positions of w inflates to more than the 2 bytes")
    short = zlib.compress(b"\xc0")
    coded = entry(coding=Coding.DEFLATED, bytes=len(short))
    refused(forged(TensorTable(None, 0, (coded,)), short + VALUES), "positions of w are 1 bytes; 2 are right")


@pytest.mark.parametrize("coding", [Coding.GAPS, Coding.DEFLATED, Coding.ENTROPY])
def test_a_large_message_for_a_small_tensor_takes_no_memory(coding):
    """100 MB for a tensor of 4 kB took 7.4 GB."""
    shapes, size = {"w": (1000,)}, 40_000_000
    coded = TableEntry("w", torch.float32, (1000,), 2, coding, 0 if coding == Coding.ENTROPY else size)
    data = forged(TensorTable(None, size if coding == Coding.ENTROPY else 0, (coded,)), b"\xff" * size + VALUES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(data, "at most", shapes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bool])
@pytest.mark.parametrize("density", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_no_message_is_larger_than_the_largest_of_its_shapes(dtype, density):
    update = {f"{size}": sparse((size,), density, dtype) for size in (1, 9, 100, 5000, 300_000)}
    assert len(encode(update)) <= largest_message(shapes_of(update))


def test_what_is_not_a_message():
    refused(b"", "not one of secateur's")
    refused(b"PK\3\4" + bytes(40), "not one of secateur's")
    refused(DATA[:4] + b"\2" + DATA[5:], "has the version 2; this decoder reads 1")
    refused(DATA[:-1], "wrong checksum")
    refused(DATA[:40] + bytes([DATA[40] ^ 1]) + DATA[41:], "wrong checksum")
    refused(sealed(struct.pack("<I", 2**32 - 1)), "its table is cut off")


def test_unknown_codes_are_named():
    for at, sentence in ((1, "unknown dtype 99"), (2, "unknown coding 99")):
        plain = bytearray(zlib.decompress(pack(TensorTable(None, 0, (entry(),)))))
        plain[plain.index(b"w") + at] = 99
        packed = zlib.compress(bytes(plain))
        refused(sealed(struct.pack("<I", len(packed)) + packed), sentence)


def test_a_dtype_that_has_no_code_is_refused():
    with pytest.raises(WrongInput, match=r"w is torch.complex64; allowed: bool, float64, float32"):
        encode({"w": torch.ones(2, dtype=torch.complex64)})
    assert len(set(DTYPES)) == len(DTYPES)


def survives(data: bytes) -> None:
    """It is refused in one sentence, or it is a whole update of the shapes that were expected."""
    try:
        found = decode(data, SHAPES)
    except WrongInput as wrong:
        assert str(wrong).count("\n") == 0
    else:
        assert shapes_of(found) == SHAPES


@settings(quick, max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_never_crash_the_decoder(noise):
    survives(noise)
    survives(sealed(noise))
    survives(sealed(struct.pack("<I", len(noise)) + noise))
    packed = zlib.compress(noise)
    survives(sealed(struct.pack("<I", len(packed)) + packed + noise))


@settings(quick, max_examples=200)
@given(st.lists(st.integers(0, 8 * len(DATA) - 1), min_size=1, max_size=4), st.booleans())
def test_flipped_bits_never_crash_it_even_with_a_right_checksum(places, reseal):
    changed = bytearray(DATA)
    for place in places:
        changed[place // 8] ^= 1 << place % 8
    survives(sealed(bytes(changed[9:])) if reseal else bytes(changed))


@settings(quick, max_examples=200)
@given(st.data())
def test_a_changed_table_never_crashes_it(data):
    end = HEAD + int.from_bytes(DATA[9:HEAD], "little")
    plain = bytearray(zlib.decompress(DATA[HEAD:end]))
    for _ in range(data.draw(st.integers(1, 3))):
        plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
    packed = zlib.compress(bytes(plain))
    survives(sealed(struct.pack("<I", len(packed)) + packed + DATA[end:]))


@quick
@given(st.integers(0, len(DATA) - 1), st.booleans())
def test_a_cut_message_is_always_refused(length, reseal):
    with pytest.raises(WrongInput):
        decode(sealed(DATA[9:length]) if reseal else DATA[:length], SHAPES)
