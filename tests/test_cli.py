import json
import subprocess
import sys

import pytest

from secateur.cli import main
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

TINY = ["--set", "train.epochs=2", "--set", "finetune.epochs=1", "--shadows", "1", "--set", "examples=400"]


def audit(*arguments):
    return main(["audit", *TINY, *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "audit"
    assert audit("--out", folder, "--pruner", "l1-unstructured", "--attack", "conf") == 0
    return folder


def test_an_audit_writes_its_folder(finished):
    assert {"config.yaml", "results.jsonl", "records.csv", "report.html", "run.json"} <= {
        p.name for p in finished.iterdir()
    }
    rows = [row.to_json() for row in load_rows(finished)]
    needed = {"schema", "model", "dataset", "pruner", "sparsity", "defense", "adaptive", "attack", "seed", "metric"}
    assert all(needed | {"value", "low", "high"} <= row.keys() for row in rows)
    assert {row["pruner"] for row in rows} == {"none", "l1-unstructured"}
    assert {"auc", "test_accuracy", "flops_masked"} <= {row["metric"] for row in rows}
    assert all(row["timing"] == row["metric"].startswith("seconds") for row in rows)


def test_json_prints_the_rows_and_nothing_else(finished, capsys):
    assert audit("--out", finished, "--pruner", "l1-unstructured", "--attack", "conf", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == [row.to_json() for row in load_rows(finished)]


def test_the_written_configuration_gives_the_same_rows(finished, tmp_path):
    assert main(["audit", str(finished / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    assert select_comparable(load_rows(tmp_path / "again")) == select_comparable(load_rows(finished))


def test_a_changed_setting_recomputes_only_what_it_must(finished):
    before = {p.name: p.stat().st_mtime_ns for p in (finished / "artifacts").iterdir()}
    assert audit("--out", finished, "--pruner", "l1-unstructured", "--attack", "conf,mentr") == 0
    after = {p.name: p.stat().st_mtime_ns for p in (finished / "artifacts").iterdir()}
    assert all(after[name] == time for name, time in before.items())
    assert {name.split("-")[0] for name in after.keys() - before.keys()} == {"attack", "auc_change"}


def test_a_report_can_be_written_again_and_of_several(finished, tmp_path, capsys):
    page = tmp_path / "both.html"
    assert main(["report", str(finished), str(finished), "--out", str(page)]) == 0
    assert "l1-unstructured 0.7" in page.read_text()
    assert main(["report", str(finished), str(finished)]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["attacks", "defenses", "pruners", "models", "datasets"])
def test_lists_as_a_table_and_as_objects(kind, capsys):
    assert main(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and all({"name", "summary", "paper", "defaults"} <= row.keys() for row in rows)
    assert main(["list", kind]) == 0
    assert rows[0]["name"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["audit", "--sparsity", "1.5"], "sparsity"),
        (["audit", "--pruner", "l1"], "pruner: 'l1' is not known; did you mean"),
        (["audit", "--model", "resnet19"], "model: 'resnet19' is not known; did you mean 'resnet18"),
        (["audit", "--data", "digit"], "did you mean 'digits'"),
        (["audit", "--device", "cuda:99"], "device"),
        (["audit", "nowhere.yaml"], "config: nowhere.yaml cannot be read"),
        (["audit", "a.yaml", "--config", "b.yaml"], "config: is set twice; name the run file"),
        (["audit", "--spasity", ".5"], "--sparsity"),
        (["adit"], "No such command 'adit'"),
        (["audit", "--attack", "ig"], "attack: ig is an inversion attack, and a membership attack is expected here; "),
        (
            ["invert", "--attack", "conf"],
            "attack: conf is a membership attack, and an inversion attack is expected here; ",
        ),
        (["audit", "--seeds", "2", "--seeds", "3"], "seeds: is set twice; use one comma-separated list"),
        (["federate", "--attack-clients", "2", "--attack-clients=3"], "attack_clients: is set twice; use one comma-"),
        (["list"], "kind: is missing; allowed: attacks, defenses, pruners"),
        (["list", "attack"], "kind: 'attack' is not known; did you mean 'attacks'"),
        (["prune", "--out", "model.pt"], "out: model.pt is not allowed"),
        (["prune", "--weights", "nowhere.safetensors"], "weights"),
        (["report", "nowhere"], "run"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert said.err.count("\n") == 1 and "Traceback" not in said.err
    assert said.out == ""


def test_defenses_are_listed_by_where_they_act(capsys):
    assert main(["list", "defenses"]) == 0
    said = capsys.readouterr().out
    places = [said.index(f"(secateur {command}") for command in ("invert", "audit", "federate)")]
    assert places[0] < said.index("soteria")
    assert places[1] < said.index("ppb")
    assert places[2] < said.index("pseudo-largest")
    assert said.count("\n priprune ") == 1


@pytest.mark.parametrize(
    "command", ["audit", "prune", "recommend", "invert", "federate", "reproduce", "sweep", "list", "report"]
)
def test_help_is_plain_text(command, capsys):
    assert main([command, "--help"]) == 0
    assert "\\[" not in (said := capsys.readouterr().out)
    assert command != "list" or "|submodels|models|datasets|studies" in "".join(said.split())


ARGUMENTS = {
    "reproduce": "NAME is that of the table",
    "report": "RUN... are folders of runs",
    "sweep": "FILE.yaml lists them",
}


@pytest.mark.parametrize("command", ["audit", "prune", "recommend", "invert", "federate", *ARGUMENTS])
def test_help_says_what_the_argument_is(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"\n  {ARGUMENTS.get(command, 'FILE.yaml is a run file')}" in capsys.readouterr().out


def test_a_folder_that_belongs_to_something_else(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert audit("--out", tmp_path) == 2
    assert "out" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_models_of_the_users_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def good(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 9))\n"
        "class Broken(nn.Linear):\n    def forward(self, x): return super().forward(x.flatten(1)) * float('nan')\n"
        "def broken(): return Broken(64, 10)\n"
    )
    pruner = ["--pruner", "l1-unstructured", "--attack", "conf"]
    assert audit("--model", "own_models:good", "--out", tmp_path / "good", *pruner) == 0
    capsys.readouterr()
    for name, expected in (("narrow", "(2, 9)"), ("broken", "NaN"), ("missing", "cannot be imported")):
        assert audit("--model", f"own_models:{name}", "--out", tmp_path / name, *pruner) == 2
        assert expected in capsys.readouterr().err
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("command", [[], ["audit"], ["federate"]])
def test_help_does_not_import_torch(command):
    code = f"import sys; from secateur.cli import main; main({[*command, '--help']}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Show this message and exit." in done.stdout


def test_lists_of_a_federation_join_when_their_flag_is_repeated(monkeypatch):
    read = []
    monkeypatch.setattr("secateur.experiments.federate.plan", lambda config: read.append(config) or [])
    lists = ["--attack-at", "1", "--attack-at", "2,3", "--membership", "yeom", "--membership", "lira"]
    assert main(["federate", "--attack", "ig", "--dry-run", *lists]) == 0
    widths = ["--submodels", "heterofl", "--client-widths", ".5", "--client-widths", ".25"]
    assert main(["federate", "--attack", "yeom", "--dry-run", *widths]) == 0
    assert read[0].attack_at == [1, 2, 3] and read[0].membership == ["yeom", "lira"]
    assert read[1].client_widths == [0.5, 0.25]
