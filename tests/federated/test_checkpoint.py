"""A federation that was put down, or killed, goes on as if it had not been."""

import copy
import errno
import os

import pytest
import torch
from test_client_training import CASES

from alone import pictures
from secateur.errors import WrongInput
from secateur.federated import checkpoint
from secateur.federated.checkpoint import FederationLog, depends_of, run_or_resume
from secateur.federated.faults import Faults
from secateur.federated.federation import Round
from secateur.runs.artifacts import NoSpace
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from tiny_rules import ROWS, Withhold, federation, plain_net


class Killed(BaseException):
    pass


@pytest.mark.parametrize("case", CASES)
def test_put_down_and_taken_up_between_any_two_rounds(case):
    def new():
        terms = {"faults": Faults(drop_out=0.1, nan=0.1)} | CASES[case]
        return federation(terms.pop("net", plain_net)(), **terms)

    whole, first = new(), new()
    rows = [measure for done in whole.rounds() for measure in done.measures]
    kept, rounds, begun = whole.state()[0], first.rounds(), []
    for _ in range(3):
        begun += next(rounds).measures
        second, (tensors, data) = new(), first.state()
        second.load({name: value.clone() for name, value in tensors.items()}, copy.deepcopy(data))
        assert begun + [measure for done in second.rounds() for measure in done.measures] == rows
        other = second.state()[0]
        assert kept.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in kept.items())


def follow(folder, kill_after=None):
    with open_run(folder, "federate", {}) as run:
        fed, story, count = federation(withholding=Withhold()), FederationLog(), 0

        def tell(done):
            nonlocal count
            count += 1
            labels = {"model": "m", "dataset": "d", "seed": 0, "extra": {"round": done.number}}
            story.rows.extend(Row(**labels, metric=m.metric, value=m.value) for m in done.measures)
            if count == kill_after:
                raise Killed

        fed.every = 0
        depends = depends_of(fed.terms, fed.net, pictures(ROWS, 8), fed.seed, fed.device)
        return *run_or_resume(run, fed, story, tell, depends), count


def test_a_killed_stage_goes_on(tmp_path):
    model, story, rounds = follow(tmp_path / "whole")
    assert rounds == 4
    with pytest.raises(Killed):
        follow(tmp_path / "killed", kill_after=3)
    assert list(tmp_path.glob("killed/unfinished/*.safetensors"))
    again, told, rest = follow(tmp_path / "killed")
    assert rest == 2  # the third round was not saved yet
    assert all(torch.equal(value, again[name]) for name, value in model.items())
    assert [row.to_json() for row in told.rows] == [row.to_json() for row in story.rows]
    assert not list(tmp_path.glob("killed/unfinished/*"))
    assert follow(tmp_path / "killed")[2] == 0  # done


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_a_checkpoint_that_was_cut_short_is_not_believed(tmp_path, cut):
    model, story, _ = follow(tmp_path / "whole")
    with pytest.raises(Killed):
        follow(tmp_path / "killed", kill_after=3)
    for saved in tmp_path.glob("killed/unfinished/*.safetensors"):
        saved.write_bytes(saved.read_bytes()[:cut])
    again, told, rounds = follow(tmp_path / "killed")
    assert rounds == 4  # from the beginning
    assert all(torch.equal(value, again[name]) for name, value in model.items())
    assert [row.to_json() for row in told.rows] == [row.to_json() for row in story.rows]


def test_logs_are_saved_as_one_and_share_the_time(tmp_path):
    row = Row(model="m", dataset="d", seed=0, metric="auc", value=0.5)

    def followed(stop=None):
        logs, fed = [FederationLog(), FederationLog()], federation()
        fed.every = 0

        def record(done):
            logs[1].rows.append(row)
            if done.number == stop:
                raise Killed

        checkpoint.follow(tmp_path, "key", fed, logs, record)
        return logs

    with pytest.raises(Killed):
        followed(stop=3)
    logs = followed()  # the third round was not saved yet
    assert [len(log.rows) for log in logs] == [0, 4] and logs[1].rows[0] == row
    assert logs[0].seconds == logs[1].seconds > 0


@pytest.mark.parametrize(
    ("size", "seconds", "files"),
    [(1, 1, 1), (3e7, 4, 0), (3e7, 6, 1), (3e8, 29, 0), (3e8, 31, 1), (3e9, 31, 0), (3e9, 201, 1)],
)
def test_the_first_saving_waits_by_the_bytes_it_would_write(tmp_path, monkeypatch, size, seconds, files):
    """A tenth of a second to write is worth it every 5 s, a second every 30 s, 10 s every 200 s."""
    fed, now = federation(rounds=2), [0.0]
    state = fed.state
    big = torch.zeros(1).expand(int(size) // 4)  # no memory
    monkeypatch.setattr(fed, "state", lambda: (state()[0] | {"observer.0.big": big}, state()[1]))
    monkeypatch.setattr(checkpoint, "save", lambda place, result, key: place.write_bytes(b""))
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])

    def tell(done):
        now[0] += seconds if done.number == 1 else 0

    with open_run(tmp_path, "federate", {}) as run:
        monkeypatch.setattr(checkpoint, "forget", lambda *_: None)
        run_or_resume(run, fed, FederationLog(), tell, {})
    assert len(list(tmp_path.glob("unfinished/*"))) == files


@pytest.mark.parametrize(
    ("takes", "later", "savings"),
    [(0.0, 0, 999), (0.01, 0, 999), (0.5, 0, 39), (10.0, 0, 4), (60.0, 0, 0), (0.0, 1, 3), (0.01, 1, 3), (10.0, 1, 3)],
)
def test_saving_takes_at_most_a_twentieth_of_the_time(tmp_path, monkeypatch, takes, later, savings):
    """Rounds of a second: each is saved where that is cheap; what takes 10 s every 200 s; what takes longer never.

    Where updates wait for others all the time every 300 s, as saving ends that.
    """
    fed, now, saved = federation(rounds=1000, evaluate_every=1000, per_round=1), [0.0], []
    monkeypatch.setattr(type(fed), "puts_off", bool(later))
    whole = type(fed).run_round

    def last_only(self, number):
        """Train in the last round alone: the others are here for their time."""
        self.number = number
        return whole(self, number) if number == 1000 else Round(number)

    monkeypatch.setattr(type(fed), "run_round", last_only)
    state, big = fed.state, torch.zeros(1).expand(int(takes * 3e8) // 4)  # no memory
    monkeypatch.setattr(fed, "state", lambda: (state()[0] | {"observer.0.big": big}, state()[1]))
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])

    def save(place, result, key):
        now[0] += takes
        saved.append(fed.number)
        place.write_bytes(b"")

    def tell(done):
        now[0] += 1

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(checkpoint, "forget", lambda *_: None)
    with open_run(tmp_path, "federate", {}) as run:
        run_or_resume(run, fed, FederationLog(), tell, {})
    assert len(saved) == savings and takes * len(saved) <= 1000 / 20


def test_a_full_disk_does_not_end_a_run(tmp_path, monkeypatch, caplog):
    whole, *_ = follow(tmp_path / "whole")
    tried, fsync = [], os.fsync

    def full(descriptor):
        if "unfinished" in os.readlink(f"/proc/self/fd/{descriptor}"):
            tried.append(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    model, story, rounds = follow(tmp_path / "full")
    assert rounds == 4 and len(tried) == 3 and not list(tmp_path.glob("full/unfinished/*"))
    assert all(torch.equal(value, model[name]) for name, value in whole.items())
    assert "no round is kept; the run goes on" in caplog.text and story.rows


def test_an_earlier_round_outlives_a_disk_that_fills_up(tmp_path, monkeypatch, caplog):
    with pytest.raises(Killed):
        follow(tmp_path, kill_after=2)
    (kept,) = tmp_path.glob("unfinished/*.safetensors")
    before = kept.read_bytes()

    def full(*_):
        raise NoSpace("out", "no space left")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(Killed):
        follow(tmp_path, kill_after=3)
    assert kept.read_bytes() == before and "an earlier round is kept" in caplog.text


def test_anothers_state_is_refused():
    tensors, data = federation().state()
    with pytest.raises(WrongInput, match="another federation"):
        federation(seed=1).load(tensors, data)
    with pytest.raises(WrongInput, match="another federation"):
        federation(server_momentum=0.5).load(tensors, data)
