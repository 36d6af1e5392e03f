"""The generator of a run is trained as one of its stages: a run that is killed meanwhile goes on where it was."""

import pytest

from secateur.attacks.inversion import generator
from secateur.config import Invert, read
from secateur.experiments import invert_targets
from secateur.experiments.invert import run_invert
from secateur.runs import unfinished
from secateur.runs.rows import select_comparable


def settings():
    given = {"attack": "ggl:iterations=2:population=4", "targets": 2, "generator_steps": 5, "generator_width": 2}
    return read(Invert, None, given)


def test_a_run_that_is_killed_while_its_generator_is_trained_ends_with_equal_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "EVERY", 0.0)
    whole = run_invert(settings(), tmp_path / "whole")
    steps, train = [], generator.train_generator

    def killed(*arguments, **more):
        keeper = arguments[-1]
        save = keeper.save

        def stop(state, pictures):
            save(state, pictures)
            steps.append(int(state["step"]))
            if len(steps) == 3:
                raise KeyboardInterrupt

        keeper.save = stop
        return train(*arguments, **more)

    monkeypatch.setattr(invert_targets, "train_generator", killed)
    with pytest.raises(KeyboardInterrupt):
        run_invert(settings(), tmp_path / "killed")
    assert len(list((tmp_path / "killed" / "unfinished").glob("generator-*.safetensors"))) == 1
    again = run_invert(settings(), tmp_path / "killed")
    assert steps == [1, 2, 3, 4, 5]
    assert select_comparable(again) == select_comparable(whole)
    left = tmp_path / "killed" / "unfinished"
    assert not left.exists() or not list(left.glob("generator-*"))
    made = [next((tmp_path / name / "artifacts").glob("generator-*")).read_bytes() for name in ("whole", "killed")]
    assert made[0] == made[1]
