import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.data.archives import read_pickle
from secateur.errors import WrongInput

HERE = Path("data_batch_1")


def python2_batch(pixels, labels):
    """The opcodes that Python 2 and numpy 1 wrote into CIFAR's files: byte strings, numpy.core, protocol 2."""
    text = lambda value: b"U" + bytes([len(value)]) + value  # noqa: E731
    rows, columns = pixels.shape
    kind = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R(K\x01"
    array += b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86" + kind + b"\x89"
    array += b"T" + struct.pack("<I", pixels.size) + pixels.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}q\x01(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def test_the_bytes_that_python_2_wrote():
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data = python2_batch(pixels, [3, 1, 2])
    assert np.array_equal(pickle.loads(data, encoding="bytes")[b"data"], pixels)  # the real reader agrees
    found = read_pickle(data, HERE)
    assert np.array_equal(found["data"], pixels)
    assert found["labels"] == [3, 1, 2]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_todays_spelling(protocol):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    found = read_pickle(pickle.dumps({b"data": pixels, "fine_labels": [1, 2, 99]}, protocol), HERE)
    assert np.array_equal(found["data"], pixels)
    assert found["fine_labels"] == [1, 2, 99]


class Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_that_a_pickle_names_is_called(tmp_path, protocol):
    ran = tmp_path / "ran"
    for payload in (Runs(os.system, f"touch {ran}"), Runs(eval, f"open({str(ran)!r}, 'w')"), Runs(os.mkdir, str(ran))):
        with pytest.raises(WrongInput, match="not a safe pickle"):
            read_pickle(pickle.dumps({"data": payload}, protocol), HERE)
    assert not ran.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": np.zeros(2)}, 2),  # floats
        pickle.dumps({"data": np.array([None])}, 2),  # objects
        pickle.dumps({"data": np.zeros((2, 3), dtype=np.uint8)}, 2)[:-20],
        b"\x80\x02cnumpy\nload\nU\x06x.npy.\x85R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00rot\x86R.",
        b"\x80\x02c__builtin__\ngetattr\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",  # dotted names walk attributes in protocol 4
        b"\x80\x02}r\xff\xff\xff\x7f.\x00"[:-2],  # a huge memo index, cut off
        b"(" * 100_000,
    ],
)
def test_other_pickles_are_refused_in_one_sentence(data):
    with pytest.raises(WrongInput) as caught:
        read_pickle(data, HERE)
    assert caught.value.field == "data"


def test_a_huge_memo_index_costs_no_memory():
    import tracemalloc

    tracemalloc.start()
    assert read_pickle(b"\x80\x02}r\xff\xff\xff\x7f.", HERE) == {}
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(position, byte):
    buffer = bytearray(python2_batch(np.arange(12, dtype=np.uint8).reshape(3, 4), [3, 1, 2]))
    buffer[position % len(buffer)] = byte
    try:
        read_pickle(bytes(buffer), HERE)
    except WrongInput as error:
        assert "data_batch_1" in str(error)
