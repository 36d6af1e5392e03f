import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from secateur.data.partition import (
    FEMNIST_GROUPS,
    Part,
    by_writer,
    dirichlet_labels,
    dirichlet_sizes,
    draw_shared,
    halve,
    iid,
    writer_groups,
)
from secateur.errors import WrongInput

TABLE_2 = [17020, 7400, 7040, 6310, 4060, 3110, 1660, 1650, 1260, 490]  # MaPP-FL's client sizes
seeds = st.integers(0, 2**31 - 1)
labels = st.lists(st.integers(0, 6), min_size=1, max_size=150).map(torch.tensor)


def is_partition(parts, n):
    """Disjoint, complete and none empty."""
    return all(len(rows) for rows in parts) and torch.cat([*parts]).sort().values.tolist() == list(range(n))


def made_or_refused(make, n, clients):
    """A partition, or an error that names the clients without rows."""
    try:
        parts = make()
    except WrongInput as error:
        assert error.field == "clients"
        assert "no rows are left for client" in error.message
        return
    assert len(parts) == clients
    assert is_partition(parts, n)


def test_the_sizes_of_table_2():
    cifar = torch.arange(10).repeat(5000)
    parts = dirichlet_sizes(cifar, 10)
    assert [len(rows) for rows in parts] == TABLE_2
    assert is_partition(parts, 50_000)
    for rows, size in zip(parts, TABLE_2, strict=True):
        assert (cifar[rows].bincount(minlength=10) == size // 10).all()


def test_the_rows_of_a_class_are_shuffled_before_they_are_dealt():
    first = dirichlet_sizes(torch.zeros(100, dtype=torch.int64), 3)[0]
    assert first.max() >= len(first)


@given(labels=labels, clients=st.integers(1, 12), alpha=st.floats(0.05, 20), seed=seeds)
def test_dirichlet_sizes_is_a_partition(labels, clients, alpha, seed):
    made_or_refused(lambda: dirichlet_sizes(labels, clients, alpha, seed), len(labels), clients)


@given(labels=labels, clients=st.integers(1, 12), alpha=st.floats(0.05, 20), seed=seeds)
def test_dirichlet_labels_is_a_partition(labels, clients, alpha, seed):
    rng = Generator().manual_seed(seed)
    made_or_refused(lambda: dirichlet_labels(labels, clients, alpha, rng), len(labels), clients)


@given(n=st.integers(0, 100), clients=st.integers(1, 12), seed=seeds)
def test_iid_is_a_partition_into_equal_shares(n, clients, seed):
    rng = Generator().manual_seed(seed)
    if n < clients:
        with pytest.raises(WrongInput, match=f"no rows are left for client .* of {clients}; "):
            iid(n, clients, rng)
        return
    parts = iid(n, clients, rng)
    assert is_partition(parts, n)
    assert {len(rows) for rows in parts} <= {n // clients, n // clients + 1}


@given(n=st.integers(1, 60), clients=st.integers(1, 40), size=st.integers(1, 70), seed=seeds)
def test_shares_that_overlap_hold_a_row_once(n, clients, size, seed):
    rng = Generator().manual_seed(seed)
    if size > n:
        with pytest.raises(WrongInput, match=f"^client_rows: {size} "):
            draw_shared(n, clients, size, rng)
        return
    parts = draw_shared(n, clients, size, rng)
    assert len(parts) == clients and parts[-1].tolist() == parts[clients - 1].tolist()
    assert all(len(rows.unique()) == size and rows.max() < n for rows in parts)


def test_of_many_clients_without_rows_a_few_are_named(rng):
    with pytest.raises(WrongInput, match="no rows are left for client 2, 3, 4 and others of 900; "):
        iid(2, 900, rng)


def test_a_small_alpha_skews_the_labels_and_a_big_one_does_not(rng):
    cifar = torch.arange(10).repeat(500)

    def biggest_class_share(alpha):
        parts = dirichlet_labels(cifar, 5, alpha, rng)
        return sum((cifar[rows].bincount().max() / len(rows)).item() for rows in parts) / 5

    assert biggest_class_share(0.1) > 0.3
    assert biggest_class_share(1000.0) < 0.12


def test_the_generator_alone_decides():
    cifar = torch.arange(10).repeat(50)
    one, two, other = (torch.cat(dirichlet_labels(cifar, 5, 1.0, Generator().manual_seed(seed))) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_by_writer():
    parts = by_writer(torch.tensor([7, 3, 7, 9, 3, 7]))
    assert [rows.tolist() for rows in parts] == [[1, 4], [0, 2, 5], [3]]


@given(writers=st.lists(st.integers(0, 30), min_size=1, max_size=120).map(torch.tensor), seed=seeds)
def test_writer_groups_keep_writers_whole(writers, seed):
    rng = Generator().manual_seed(seed)
    count = len(writers.unique())
    if count <= 5:
        with pytest.raises(WrongInput, match=f"^data: its {count} writers are too few for clients of 2, 3 and all"):
            writer_groups(writers, (2, 3), rng)
        return
    parts = writer_groups(writers, (2, 3), rng)
    assert is_partition(parts, len(writers))
    groups = [set(writers[rows].tolist()) for rows in parts]
    assert sorted(len(group) for group in groups) == sorted([2, 3, count - 5])
    assert len(set.union(*groups)) == count
    assert [len(rows) for rows in parts] == sorted((len(rows) for rows in parts), reverse=True)


def test_the_papers_groups_make_ten_clients(rng):
    assert FEMNIST_GROUPS == (3, 6, 9, 12, 15, 18, 21, 24, 27)
    parts = writer_groups(torch.arange(200), FEMNIST_GROUPS, rng)
    assert [len(rows) for rows in parts] == [65, 27, 24, 21, 18, 15, 12, 9, 6, 3]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_alpha_is_refused(alpha, rng):
    with pytest.raises(WrongInput, match=r"^alpha: "):
        dirichlet_labels(torch.arange(10), 2, alpha, rng)
    with pytest.raises(WrongInput, match=r"^alpha: "):
        dirichlet_sizes(torch.arange(10), 2, alpha)


def test_no_clients_is_refused(rng):
    for make in (lambda: iid(10, 0, rng), lambda: dirichlet_sizes(torch.arange(10), 0)):
        with pytest.raises(WrongInput, match=r"^clients: 0"):
            make()


@pytest.mark.data
def test_real_writers(data_folder):
    import gzip
    import struct

    raw = gzip.decompress((data_folder / "QMNIST/raw/qmnist-train-labels-idx2-int.gz").read_bytes())
    count, columns = struct.unpack(">II", raw[4:12])
    table = torch.frombuffer(bytearray(raw[12:]), dtype=torch.uint8).view(count, columns, 4)
    writers = table[:, 2, 2].long() * 256 + table[:, 2, 3]  # class, hsf series, writer, ...; big-endian
    parts = by_writer(writers)
    assert len(parts) == 539
    assert (min(map(len, parts)), max(map(len, parts))) == (19, 131)


def test_halves_share_only_the_rows_for_early_stopping():
    part = Part(torch.arange(5), torch.arange(100, 103), torch.arange(10, 14))
    one, other = halve(part, torch.Generator().manual_seed(0))
    assert [len(half.train) for half in (one, other)] == [2, 3] and len(one.test) == len(other.test) == 2
    assert sorted([*one.train.tolist(), *other.train.tolist()]) == part.train.tolist()
    assert sorted([*one.test.tolist(), *other.test.tolist()]) == part.test.tolist()
    assert one.validation is other.validation is part.validation
    with pytest.raises(WrongInput, match="cannot be halved"):
        halve(Part(torch.arange(1), torch.arange(2), torch.arange(9)), torch.Generator())
