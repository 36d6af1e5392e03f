"""A training that was put down, or killed, goes on as if it had not been."""

from dataclasses import replace

import pytest
import torch

from alone import pictures, small
from secateur.config import defense
from secateur.defenses.error_feedback import RESIDUAL, upload_of
from secateur.errors import WrongInput
from secateur.federated.augment import CropAndFlip
from secateur.federated.collaborative.plan import Plan, schedule_of
from secateur.federated.collaborative.training import STAGE, TIMES, CollaborativeTraining, collaborate, depends_of
from secateur.runs.artifacts import key_of
from secateur.runs.folder import open_run


def new(upload="adgp+error-feedback", seed=1, **others):
    plan = Plan(3, upload_of(defense(upload)), schedule_of([0.1, 0.1, 0.05]), transform=CropAndFlip(1), batch_size=3)
    return CollaborativeTraining(
        small(dropout=0.3), pictures(), replace(plan, **others), torch.Generator().manual_seed(seed)
    )


def comparable(history):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in history]


class Killed(BaseException):
    pass


def sizes(epoch):
    """Entries that the first user sent."""
    return {"sent": float(sum(int((value != 0).sum()) for value in epoch.sent[0].values()))}


@pytest.mark.parametrize("upload", ["adgp+error-feedback", "dgp:release=2+error-feedback", "noise", "outpost:beta=1"])
@pytest.mark.parametrize("after", [1, 2])
def test_put_down_and_taken_up_between_two_epochs(upload, after):
    whole = new(upload)
    rows = [epoch.row for epoch in whole.epochs()]
    first = new(upload)
    epochs = first.epochs()
    begun = [next(epochs).row for _ in range(after)]
    kept = {name: value.clone() for name, value in first.state().items()}
    second = new(upload)
    second.load(kept)
    assert comparable(begun + [epoch.row for epoch in second.epochs()]) == comparable(rows)
    assert all(torch.equal(value, second.state()[name]) for name, value in whole.state().items())


def test_another_trainings_state_is_refused():
    kept = new().state()
    for other in (new(seed=2), new("noise"), new(users=2)):
        with pytest.raises(WrongInput, match="another training"):
            other.load(kept)


def test_a_killed_run_ends_with_equal_rows(tmp_path):
    with open_run(tmp_path / "whole", "test", {}) as run:
        whole = collaborate(run, new(), measure=sizes)
    training, seen = new(), []

    def dies(advance):
        for epoch in CollaborativeTraining.epochs(training, advance):
            seen.append(epoch)
            yield epoch
            if len(seen) == 2:  # the second epoch is done and kept
                raise Killed

    training.epochs = dies
    with pytest.raises(Killed), open_run(tmp_path / "killed", "test", {}) as run:
        collaborate(run, training, measure=sizes, every=0)
    assert len(list((tmp_path / "killed" / "unfinished").iterdir())) == 1
    again = new()
    with open_run(tmp_path / "killed", "test", {}) as run:
        made = collaborate(run, again, measure=sizes, every=0)
    assert again.epoch == 3 and not list((tmp_path / "killed" / "unfinished").iterdir())
    assert comparable(made.history) == comparable(whole.history)
    assert made.history[0]["seconds"] == seen[0].row["seconds"]  # it was not trained again
    for one, other in ((made.state, whole.state), (made.client, whole.client)):
        assert list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())
    assert list(made.state) == list(small().state_dict())
    assert {name for name in made.client if name.startswith(RESIDUAL)}


def test_a_finished_one_is_taken_as_it_is_and_another_plan_is_trained(tmp_path):
    with open_run(tmp_path, "test", {}) as run:
        first = collaborate(run, new())
        same = new()
        assert collaborate(run, same).history == first.history
        assert same.epoch == 0
        assert same.plan.description["augmentation"] == "CropAndFlip(padding=1, black=(0.0,))"
        for other in (new(seed=2), new("noise"), new(weight_decay=0.1), new(transform=None), new(batch_size=4)):
            assert collaborate(run, other).history[0]["train_loss"] != first.history[0]["train_loss"]
            assert other.epoch == 3
        again = new()
        collaborate(run, again, also={"beta": 1})
        assert again.epoch == 3


def test_a_damaged_file_counts_as_none(tmp_path):
    with open_run(tmp_path / "a", "test", {}) as run:
        whole = collaborate(run, new())
    key = key_of(STAGE, depends_of(new()) | {"measure": "none", "also": {}})
    with open_run(tmp_path / "b", "test", {}) as run:
        place = tmp_path / "b" / "unfinished" / f"{STAGE}-{key[:16]}.safetensors"
        place.parent.mkdir()
        place.write_bytes(b"nonsense" * 40)
        assert comparable(collaborate(run, new()).history) == comparable(whole.history)
        assert not place.exists()
