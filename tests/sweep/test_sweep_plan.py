"""A sweep's pieces: what the product makes, what they are called, and what is refused before any work."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from secateur.cli import main
from secateur.config import Sweep, read
from secateur.sweep.plan import LONGEST, folder_name, plan


def planned(**fields):
    return plan(Sweep.model_validate(fields))


def test_the_product_of_cases_grid_and_seeds_in_a_fixed_order():
    pieces = planned(
        job="audit",
        shadows=1,
        train={"patience": None},
        cases=[{"pruner": "snip"}, {"pruner": {"name": "l1-structured", "groups": "coupled"}}],
        grid={"sparsity": [0.5, [0.7, 0.9]], "train.epochs": [3]},
        seeds=2,
    )
    assert [piece.name for piece in pieces] == [
        f"audit-{pruner}-sparsity={sparsity}-train.epochs=3-seed={seed}"
        for pruner in ("pruner=snip", "pruner=name=l1-structured+groups=coupled")
        for sparsity in ("0.5", "0.7+0.9")
        for seed in (0, 1)
    ]
    last = pieces[-1]
    assert last.run == last.name.removesuffix("-seed=1")
    assert (last.config.seeds, last.config.sparsity, last.config.shadows) == ([1], [0.7, 0.9], 1)
    assert last.config.train.epochs == 3 and last.config.train.patience is None
    assert [str(x) for x in last.config.pruner] == ["l1-structured:groups=coupled"]
    assert pieces[0].config.train.epochs == 3  # one piece's parts are not another's


def test_several_jobs_share_what_stands_beside_them():
    jobs = {
        "updates": {"job": "invert", "seeds": 3, "data": "digits"},
        "rounds": {"job": "federate", "gpus": 0.5, "rounds": 2, "cpus": 2, "threads": 2},
        "tables": {"job": "reproduce", "grid": {"study": ["dgp-fig2", "samia-fig10"]}, "set": {"targets": 1}},
    }
    pieces = planned(jobs=jobs, data="qmnist", cpus=1)
    assert [piece.name for piece in pieces][3:] == ["rounds", "tables-study=dgp-fig2", "tables-study=samia-fig10"]
    assert [piece.config.data for piece in pieces] == ["digits"] * 3 + ["qmnist"] * 3
    assert [piece.config.device for piece in pieces] == ["cpu"] * 3 + ["cuda"] + ["cpu"] * 2
    assert [(piece.cpus, piece.gpus) for piece in pieces] == [(1, 0)] * 3 + [(2, 0.5)] + [(1, 0)] * 2
    assert pieces[3].config.seeds == [0] and pieces[4].config.seeds is None  # as without a sweep
    assert pieces[4].config.set_ == {"targets": 1}


def test_what_was_written_out_is_the_same_sweep():
    sweep = Sweep.model_validate({"job": "audit", "shadows": 1, "grid": {"sparsity": [0.5, 0.7]}, "seeds": [4]})
    again = Sweep.model_validate(yaml.safe_load(yaml.safe_dump(sweep.model_dump(mode="json", by_alias=True))))
    assert plan(again) == plan(sweep)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "job: is missing; allowed: audit, invert, federate, reproduce"),
        ({"jobs": {"a": {"seeds": 1}}}, "jobs.a.job: is missing; allowed: audit, invert, federate, reproduce"),
        ({"job": "prune"}, "job: 'prune' is not allowed"),
        ({"job": "audit", "shadws": 1}, "shadws: 'shadws' is not known; did you mean 'shadows'?"),
        ({"job": "audit", "gird": {}}, "did you mean 'grid'?"),
        ({"job": "audit", "grid": {"shadws": [1]}}, "shadws: 'shadws' is not known"),
        ({"job": "audit", "grid": {}}, "grid: {} is not allowed; must be a list of values for every field"),
        ({"job": "audit", "grid": {"sparsity": []}}, "grid: [] is not allowed"),
        ({"job": "audit", "grid": {"sparsity": 0.5}}, "grid: 0.5 is not allowed"),
        ({"job": "audit", "cases": []}, "cases: [] is not allowed"),
        ({"job": "audit", "seeds": 0}, "seeds: 0 is not allowed"),
        ({"job": "audit", "cpus": 0}, "cpus: 0 is not allowed"),
        (
            {"job": "audit", "grid": {"sparsity": [0.5, 1.2]}},
            "(in audit-sparsity=1.2)",
        ),
        ({"job": "audit", "grid": {"sparsity": [0.5, 0.5]}}, "grid: 2 pieces are called audit-sparsity=0.5"),
        ({"job": "audit", "cases": [{}, {}]}, "grid: 2 pieces are called audit;"),
        ({"job": "audit", "sparsity": 0.5, "grid": {"sparsity": [0.5]}}, "sparsity: is set in 2 places"),
        ({"job": "audit", "seeds": 2, "grid": {"seeds": [1, 2]}}, "seeds: is set in 2 places"),
        ({"job": "audit", "model": "mlp", "grid": {"model.width": [1]}}, "'model.width' is not possible"),
        ({"job": "audit", "threads": 2}, "cpus: 1 is not allowed; must be at least 2"),
        ({"job": "audit", "execution": "ray"}, "execution: ray is not possible in a sweep"),
        ({"job": "federate", "engine": "flower"}, "engine: flower is not possible in a sweep"),
        ({"job": "invert", "device": "cuda"}, "device: cuda needs gpus"),
        ({"job": "invert", "device": "cuda:1", "gpus": 1}, "device: 'cuda:1' is not allowed in a sweep"),
        ({"job": "reproduce"}, "study: is missing; must be a word"),
        ({"job": "reproduce", "study": "dgp-fig99"}, "study: 'dgp-fig99' is not known"),
        ({"jobs": {}}, "jobs: must name at least one job"),
        ({"jobs": ["audit"]}, "jobs: is not readable"),
        ({"jobs": {"../up": {"job": "audit"}}}, "jobs: '../up' is not allowed; must have names"),
        ({"jobs": {"a": {"job": "audit", "seeds": -1}}}, "jobs.a.seeds: -1 is not allowed"),
        ({"schema": 2, "job": "audit"}, "schema: 2 is not allowed"),
    ],
)
def test_wrong_input_is_refused_before_any_work(tmp_path, capsys, fields, sentence):
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    assert main(["sweep", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("secateur: ") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_dry_run_lists_the_pieces_and_does_nothing(tmp_path, capsys):
    (tmp_path / "sweep.yaml").write_text("job: audit\ngrid: {sparsity: [.5, .7]}\n")
    command = ["sweep", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out"), "--dry-run"]
    assert main([*command, "--set", "seeds=[3]", "--set", "gpus=.5"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "audit-sparsity=0.5-seed=3 (1 CPUs, 0.5 GPUs)",
        "audit-sparsity=0.7-seed=3 (1 CPUs, 0.5 GPUs)",
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("field", "file"), [("weights", "net.safetensors"), ("data", "own.npz"), ("data", "folder/of/images")]
)
def test_a_file_that_is_not_on_this_machine_is_refused_before_any_work(dry, field, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "sweep.yaml").write_text(f"job: audit\n{field}: {file}\nsparsity: [.5]\n")
    assert main(["sweep", "sweep.yaml", *dry]) == 2
    assert capsys.readouterr().err == f"secateur: {field}: {file} does not exist (in audit)\n"
    assert not (tmp_path / "runs").exists()
    assert main(["sweep", "sweep.yaml", "--address", "head:6379", "--dry-run"]) == 0  # where it may be


def test_a_piece_depends_on_its_settings_and_on_the_files_they_name(tmp_path):
    def key(**more):
        return planned(job="audit", **more)[0].key

    assert key() == key() != key(shadows=2)
    weights = tmp_path / "net.safetensors"
    weights.write_bytes(b"one")
    before = key(weights=str(weights))
    weights.write_bytes(b"two")
    assert key(weights=str(weights)) != before
    assert key(data="x" * 5000) != key()  # no path, and no error


@given(st.text(min_size=1, max_size=400))
def test_every_name_is_a_folders_name(name):
    made = folder_name("audit-" + name)
    assert re.fullmatch(r"[\w.=+,-]+", made) and len(made) <= LONGEST


def test_long_names_that_differ_late_stay_apart():
    names = {folder_name("audit-" + "x" * 300 + end) for end in ("1", "2")}
    assert len(names) == 2


def test_a_sweeps_file_is_read_as_any_other(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("job: audit\nshadows: 2\n")
    sweep = read(Sweep, file, {}, ["train.epochs=3"])
    assert plan(sweep)[0].config.train.epochs == 3


def test_the_files_of_the_documentation_are_sweeps():
    text = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    one, several = (plan(Sweep.model_validate(yaml.safe_load(x))) for x in re.findall(r"```yaml\n(.*?)```", text, re.S))
    assert len(one) == 2 * 2 * 5 and one[0].gpus == 0.25
    assert len(several) == 3 * (2 + 2 + 1 + 2)
