"""Attacks on the archive readers: each must end in one clear sentence, early, with nothing written."""

import gzip
import io
import os
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secateur.data.archives import ArchiveLimits, contents, read_idx, read_npz
from secateur.errors import WrongInput


def tar(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def idx(array):
    kind = {"uint8": 0x08, "int32": 0x0C}[array.dtype.name]
    sizes = np.array(array.shape, dtype=">u4").tobytes()
    return bytes([0, 0, kind, array.ndim]) + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def read_all(path, limits=None):
    found = contents(path, limits) if limits else contents(path)
    return {str(name): stream.read() for name, stream in found}


def refused(path, *words, read=read_all, **arguments):
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(WrongInput) as caught:
        read(path, **arguments)
    assert caught.value.field == "data"
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert sorted(path.parent.rglob("*")) == before


MEMBERS = [("a/one", b"1"), ("./a/two", b"22"), ("three", b"")]


def test_tar_tgz_zip_and_folder_give_the_same_files(tmp_path):
    expected = {"a/one": b"1", "a/two": b"22", "three": b""}
    assert read_all(tar(tmp_path / "x.tgz", MEMBERS)) == expected
    assert read_all(tar(tmp_path / "x.tar", MEMBERS, "w")) == expected
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("a")
        for name, data in MEMBERS:
            archive.writestr(name, data)
    assert read_all(tmp_path / "x.zip") == expected
    (tmp_path / "f/a").mkdir(parents=True)
    for name, data in expected.items():
        (tmp_path / "f" / name).write_bytes(data)
    assert read_all(tmp_path / "f") == {f"f/{name}": data for name, data in expected.items()}
    assert read_all(tmp_path / "f/a/one") == {"one": b"1"}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "..\\evil", "C:\\evil", "C:evil"])
def test_paths_that_leave_are_refused(tmp_path, name):
    refused(tar(tmp_path / "x.tgz", [("good", b"1"), (name, b"2")]), "leaves the archive")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("good", b"1")
        archive.writestr(name, b"2")
    refused(tmp_path / "x.zip", "leaves the archive")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_tar_are_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("bangkok")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    refused(tmp_path / "x.tgz", "link or device")


def test_symlinks_in_zip_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        member = zipfile.ZipInfo("link")
        member.external_attr = 0o120777 << 16
        archive.writestr(member, "/etc/passwd")
    refused(tmp_path / "x.zip", "link or device")


def test_a_tgz_bomb_is_stopped_while_it_is_read(tmp_path):
    path = tmp_path / "x.tgz"
    tar(path, [("skipped", bytes(100 << 20)), ("bangkok", b"1")])
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    with pytest.raises(WrongInput, match="unpacks to far more"):
        for name, stream in contents(path):  # a member that is skipped counts too
            assert name.name != "bangkok"
            del stream
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


def test_a_zip_bomb_is_refused_by_its_index(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big", bytes(40 << 20))
    refused(tmp_path / "x.zip", "unpacks to far more")
    refused(tmp_path / "x.zip", "unpacks to far more", limits=ArchiveLimits(total=1 << 20, ratio=10**6))


def test_sizes_that_are_only_declared_are_refused(tmp_path):
    member = tarfile.TarInfo("huge")
    member.size = 1 << 50
    header = member.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "x.tar").write_bytes(header + bytes(1024))
    refused(tmp_path / "x.tar", "unpacks to far more")
    (tmp_path / "x.tgz").write_bytes(gzip.compress(header + bytes(1024)))
    refused(tmp_path / "x.tgz", "unpacks to far more")


def test_a_sparse_member_cannot_make_zeros_from_nothing(tmp_path):
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 20), "GNU.sparse.numblocks": "1"}
    sparse.size = 1
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(sparse, io.BytesIO(b"1"))
    refused(tmp_path / "x.tar", "link or device")


def test_a_zip_that_lies_about_its_size_is_refused(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(5_000_000))
    data = path.read_bytes().replace(struct.pack("<I", 5_000_000), struct.pack("<I", 10))
    path.write_bytes(data)
    refused(path, "damaged")


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9, 0.999])
def test_truncated_archives_are_refused(tmp_path, share):
    rows = os.urandom(200_000)
    tar(tmp_path / "x.tgz", [("a", rows), ("b", rows)])
    (tmp_path / "x.npy.gz").write_bytes(gzip.compress(idx(np.frombuffer(rows, dtype=np.uint8))))
    np.savez(tmp_path / "x.npz", inputs=np.frombuffer(rows, dtype=np.uint8))
    for name, read in (("x.tgz", read_all), ("x.npy.gz", read_idx), ("x.npz", read_npz)):
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        refused(path, "truncated", read=read)


def test_the_last_byte_of_a_tgz_matters(tmp_path):
    path = tar(tmp_path / "x.tgz", [("a", b"1" * 1000)])
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, "truncated")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=600), suffix=st.sampled_from([".tgz", ".tar", ".zip", ".npz", ".gz"]))
def test_noise_is_read_or_refused_but_never_crashes(tmp_path, data, suffix):
    path = Path(tmp_path / f"noise{suffix}")
    path.write_bytes(data)
    read = {".npz": read_npz, ".gz": read_idx}.get(suffix, read_all)
    try:
        read(path)
    except WrongInput as error:
        assert error.field == "data"


def test_idx_reads_bytes_and_integers_plain_and_compressed(tmp_path):
    for array in (np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([[1, -2], [3, 70000]], dtype=np.int32)):
        (tmp_path / "x").write_bytes(idx(array))
        (tmp_path / "x.gz").write_bytes(gzip.compress(idx(array)))
        for name in ("x", "x.gz"):
            found, data = read_idx(tmp_path / name)
            assert np.array_equal(found, array)
            assert data == idx(array)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"\x00\x00\x08\x03" + struct.pack(">III", 2**31, 2**31, 2**31), "unpacks to far more"),
        (b"\x00\x00\x08\x01" + struct.pack(">I", 3) + b"1234", "another number"),
        (b"\x00\x00\x08\x01" + struct.pack(">I", 3) + b"12", "another number"),
        (b"\x00\x00\x08\x02" + struct.pack(">I", 3), "cut off"),
        (b"\x00\x00\x07\x01" + struct.pack(">I", 1) + b"1", "IDX"),
        (b"PK\x03\x04", "IDX"),
    ],
)
def test_idx_files_that_lie_are_refused(tmp_path, data, word):
    for name, content in (("x", data), ("x.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, word, read=read_idx)


def test_an_idx_bomb_is_not_unpacked(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x01" + struct.pack(">I", 10) + bytes(50 << 20)))
    tracemalloc.start()
    refused(tmp_path / "x.gz", "another number", read=read_idx)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_npz_objects_are_never_unpickled(tmp_path):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    np.savez(tmp_path / "x.npz", inputs=np.array([Payload()], dtype=object))
    refused(tmp_path / "x.npz", "allow_pickle", read=read_npz)
    assert not (tmp_path / "ran").exists()


def test_an_npz_that_promises_too_much_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 60,)})
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("inputs.npy", header.getvalue())
    refused(tmp_path / "x.npz", "truncated", read=read_npz)


@pytest.mark.parametrize("name", ["none.npz", "none.tar.gz", "none.bin"])
def test_a_file_that_is_not_there_is_one_sentence(name, tmp_path):
    with pytest.raises(WrongInput, match="No such file"):
        list(contents(tmp_path / name))
