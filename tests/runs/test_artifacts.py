import errno
import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from secateur.errors import WrongInput
from secateur.runs import artifacts
from secateur.runs.artifacts import NoSpace, Result, decode, encode, explained, key_of, save, write

KEY = key_of("train", {"seed": 1})
RESULT = Result({"weight": torch.arange(6.0).reshape(2, 3), "kept": torch.tensor([True, False])}, {"epochs": 3})
CONTENT = encode(RESULT, KEY)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_result_comes_back_as_it_was():
    back = decode(CONTENT, KEY)
    assert back is not None
    assert list(back.tensors) == ["weight", "kept"]  # in the order given, though the file sorts them
    assert all(torch.equal(back.tensors[name], value) for name, value in RESULT.tensors.items())
    assert back.data == {"epochs": 3}
    assert back.key == KEY


@given(data=st.dictionaries(st.text(), json_values, max_size=4), names=st.lists(st.text(min_size=1), unique=True))
@settings(deadline=None)
def test_any_data_and_names_survive(data, names):
    names = [name for name in names if name != "__metadata__"]
    back = decode(encode(Result({name: torch.ones(i) for i, name in enumerate(names)}, data), KEY), KEY)
    assert back is not None
    assert back.data == data
    assert {name: tuple(value.shape) for name, value in back.tensors.items()} == {n: (i,) for i, n in enumerate(names)}


def test_data_that_looks_like_a_checksum_survives():
    data = {"checksum": "0" * 64, 'x\\"checksum\\":\\"': "0" * 64}
    back = decode(encode(Result({'\\"checksum\\":\\"' + "0" * 64: torch.ones(1)}, data), KEY), KEY)
    assert back is not None
    assert back.data == data


def test_shared_transposed_and_gradient_tensors_are_kept():
    base = torch.arange(6.0, requires_grad=True)
    images = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    tensors = {"base": base, "view": base.reshape(2, 3).T, "images": images, "scalar": torch.tensor(1.5)}
    back = decode(encode(Result(tensors), KEY), KEY)
    assert back is not None
    assert all(torch.equal(back.tensors[name], value) for name, value in tensors.items())
    assert all(value.is_contiguous() and not value.requires_grad for value in back.tensors.values())


TYPES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 bool"
TYPES += " int64 int32 int16 int8 uint64 uint32 uint16 uint8"


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in TYPES.split()])
def test_every_type_is_kept(dtype):
    value = torch.tensor([0, 1, 1]).to(dtype)
    content = encode(Result({"x": value}), KEY)
    for back in (decode(content, KEY).tensors, safetensors.torch.load(content)):
        assert back["x"].dtype == dtype and back["x"].tolist() == value.tolist()


def test_equal_results_are_equal_bytes():
    assert encode(RESULT, KEY) == CONTENT


def test_any_safetensors_reader_opens_it(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(CONTENT)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("weight"), RESULT.tensors["weight"])


def test_saved_tensor_by_tensor_it_is_the_same_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save(path, RESULT, KEY)
    assert path.read_bytes() == CONTENT


def test_what_safetensors_wrote_has_the_same_tensors_in_the_same_place():
    """Their file and ours differ in the metadata alone."""
    tensors = {"b": torch.rand(3, 2), "a": torch.tensor([True]), "c": torch.rand(2).double(), "d": torch.ones(0)}
    ours, theirs = encode(Result(tensors), KEY), safetensors.torch.save(tensors)
    begin, start = (8 + int.from_bytes(each[:8], "little") for each in (ours, theirs))
    assert ours[begin:] == theirs[start:] and begin % 8 == 0
    back = safetensors.torch.load(ours)
    assert all(torch.equal(back[name], value) for name, value in tensors.items())


def test_every_flipped_bit_is_found():
    for position in range(len(CONTENT)):
        for bit in range(8):
            damaged = bytearray(CONTENT)
            damaged[position] ^= 1 << bit
            assert decode(bytes(damaged), KEY) is None, (position, bit)


def test_every_truncation_and_extension_is_found():
    assert all(decode(CONTENT[:length], KEY) is None for length in range(len(CONTENT)))
    assert decode(CONTENT + b"\0", KEY) is None


@given(st.binary(max_size=200))
def test_other_bytes_are_no_artifact(content):
    assert decode(content, KEY) is None


def test_an_artifact_of_another_stage_is_refused():
    assert decode(CONTENT, key_of("train", {"seed": 2})) is None


def test_the_key_follows_everything_it_should_and_no_order():
    assert key_of("a", {"x": 1, "y": [0.5, None]}) == key_of("a", {"y": (0.5, None), "x": 1})
    keys = [
        key_of("a", {"x": 1}),
        key_of("b", {"x": 1}),
        key_of("a", {"x": 2}),
        key_of("a", {"x": "1"}),
        key_of("a", {}),
    ]
    assert len(set(keys)) == len(keys)
    with pytest.raises(TypeError):
        key_of("a", {"x": torch.ones(1)})


def test_a_new_version_computes_anew(monkeypatch):
    before = key_of("a", {})
    monkeypatch.setattr("secateur.runs.artifacts.version", lambda: "99.0")
    assert key_of("a", {}) != before


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WrongInput, match=r"out: no space left to write .*file; finished stages are saved"):
        write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="left out: no /dev/full on this system")
def test_a_full_device_is_told_in_one_sentence():
    with (
        pytest.raises(NoSpace, match="no space left"),
        explained(Path("x")),
        open("/dev/full", "wb", buffering=0) as f,
    ):
        f.write(b"x")


def test_a_source_tree_without_metadata_has_a_version_too(tmp_path, monkeypatch):
    """As where src is on the path and nothing is installed."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert artifacts.version.__wrapped__() == project["version"]
    monkeypatch.setattr(artifacts, "__file__", str(tmp_path / "site-packages/secateur/runs/artifacts.py"))
    assert artifacts.version.__wrapped__() == "unknown"
