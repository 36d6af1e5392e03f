"""Data files that come from somebody else: a right result or one sentence; never a crash, or memory without bound."""

import io
import pickle
import random
import resource
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import loadmat, savemat

from secateur.data import svhn
from secateur.data.archives import map_npz, read_npz
from secateur.data.cifar import CIFAR10, _batch
from secateur.data.columns import read_columns
from secateur.data.prediction_files import read_predictions
from secateur.errors import WrongInput

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
LABELS = np.array([[1], [10], [3], [7], [2]])


def mat_file(compressed, labels=LABELS):
    file = io.BytesIO()
    savemat(file, {"X": PIXELS, "y": labels}, do_compression=compressed)
    return file.getvalue()


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.int64, np.float32, np.float64])
def test_a_matlab_file_reads_as_scipy_reads_it(tmp_path, compressed, kind):
    path = tmp_path / "a.mat"
    path.write_bytes(mat_file(compressed, LABELS.astype(kind)))
    pixels, labels = svhn._read(path)
    plain = loadmat(path)
    assert np.array_equal(pixels, plain["X"].transpose(3, 2, 0, 1))
    assert np.array_equal(labels, plain["y"].reshape(-1))


@pytest.mark.parametrize(("index", "byte"), [(184, 100), (185, 1)])  # these ended the process inside scipy
def test_a_changed_type_is_one_sentence(tmp_path, index, byte):
    content = bytearray(mat_file(False))
    content[index] = byte
    path = tmp_path / "a.mat"
    path.write_bytes(content)
    with pytest.raises(WrongInput, match="cropped format"):
        svhn._read(path)


def test_mutated_matlab_files_are_read_or_refused(tmp_path):
    draw, path = random.Random(0), tmp_path / "a.mat"
    for number in range(600):
        content = bytearray(mat_file(number % 2 == 0) if number < 2 else MATS[number % 2])
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content) if draw.random() < 0.3 else 400)] = draw.randrange(256)
        path.write_bytes(content[: draw.choice([None, None, draw.randrange(len(content))])])
        try:
            pixels, labels = svhn._read(path)
        except WrongInput:
            continue
        assert pixels.shape == (len(labels), 3, 32, 32) and labels.min() >= 1


MATS = [mat_file(True), mat_file(False)]


def test_a_matlab_file_that_unpacks_to_gigabytes_is_refused_within_bounds(tmp_path):
    import zlib

    packer = zlib.compressobj(9)
    zeros = b"\0" * 2**20
    packed = b"".join(packer.compress(zeros) for _ in range(100)) + packer.flush()
    head = b" " * 124 + b"\x00\x01IM"
    path = tmp_path / "a.mat"
    path.write_bytes(head + (15).to_bytes(4, "little") + len(packed).to_bytes(4, "little") + packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WrongInput, match="far more"):
        svhn._read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB


def test_a_pickle_that_repeats_one_list_is_refused_within_bounds(tmp_path):
    inner = [0] * 1000
    for _ in range(6):
        inner = [inner] * 100  # 1e15 numbers, one list each level
    content = pickle.dumps({"data": 0, "labels": inner}, protocol=2)
    assert len(content) < 10_000
    with pytest.raises(WrongInput, match="a label for every image"):
        _batch(CIFAR10, content, tmp_path / "data_batch_1")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_bytes_after_the_head_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "b.mat"
    path.write_bytes(b" " * 124 + b"\x00\x01IM" + content)
    with pytest.raises(WrongInput):
        svhn._read(path)


def npz_with(tmp_path, content, name="inputs.npy"):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def npy_header(text):
    """An array's file whose header is this text."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [npy_header(b"{'descr': '<f8', 'shape': (2,"), npy_header(b"{[]:1}"), npy_header(b"(" * 60), b""],
    ids=["not closed", "no dictionary", "deep", "empty"],
)
def test_a_forged_header_of_an_array_is_one_sentence(tmp_path, content):
    path = npz_with(tmp_path, content)
    for read in (read_npz, map_npz):
        with pytest.raises(WrongInput, match="damaged"):
            read(path)


def test_texts_of_characters_that_do_not_exist_are_refused(tmp_path):
    file = io.BytesIO()
    np.save(file, np.array(["ab", "c"]))
    content = file.getvalue()[:-4] + b"\xff\xff\xff\x7f"
    for read in (read_npz, map_npz):
        with pytest.raises(WrongInput, match="neither numbers nor texts"):
            read(npz_with(tmp_path, content))


def test_a_member_without_a_name_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("\0hidden"), b"1")  # a name ends at its first zero
    with pytest.raises(WrongInput, match="leaves the archive"):
        read_npz(path)


def test_texts_of_a_parquet_file_that_are_no_utf8_are_one_sentence(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    for columns in ({"name": ["words"], "y": [0]}, {"words": [1.0], "y": [0]}):
        parquet.write_table(pyarrow.table(columns), path, compression="none")
        path.write_bytes(path.read_bytes().replace(b"words", b"w\xffrds"))
        with pytest.raises(WrongInput, match="parquet"):
            read_columns("data", path)


@pytest.mark.parametrize("name", ["p0" + "9" * 60, "p" + "9" * 5000, "shadow" + "9" * 60 + "_p0", "p3"])
def test_a_number_in_the_name_of_a_column_takes_no_memory(tmp_path, name):
    path = tmp_path / "p.csv"
    path.write_text(f"p0,p1,label,membership,{name}\n.5,.5,0,1,0\n.25,.75,1,0,0\n")
    with pytest.raises(WrongInput, match=r"p\.csv has no column (p2|shadow0_p0)"):
        read_predictions(path)
