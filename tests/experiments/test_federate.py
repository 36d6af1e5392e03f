"""`secateur federate` and `secateur.federate`: rows, page, partitions, attacks inside, and what is refused."""

import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import alpha_dropout, cross_entropy, dropout

import secateur
from secateur.cli import main
from secateur.config import Federate, defense_of_clients, read
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.experiments.federate import cautions
from secateur.federated.build import load_data, shares_of
from secateur.federated.client_training import LocalTraining
from secateur.federated.federation import Federation, ServerEvaluation
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.interfaces import Batch
from secateur.runs.folder import load_figures, load_rows
from secateur.runs.rows import select_comparable

TINY = ["--model", "conv-1", "--rounds", "4", "--clients", "6", "--per-round", "3", "--local-steps", "1"]
TINY += ["--batch-size", "2", "--evaluate-every", "2", "--set", "examples=200"]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    out = tmp_path_factory.mktemp("federate") / "run"
    more = ["--base-pruning", "snip", "--defense", "none,pseudo-largest", "--attack", "ig:iterations=3"]
    assert main(["federate", "--out", str(out), *TINY, *more, "--attack-every", "2"]) == 0
    return out


def test_rows_carry_round_and_client(attacked):
    rows = load_rows(attacked)
    assert all({"round", "client", "base_pruning", "averaging", "broadcast"} <= row.extra.keys() for row in rows)
    accuracy = [(row.defense, row.extra["round"]) for row in rows if row.metric == "test_accuracy"]
    assert accuracy == [(d, r) for d in ("none", "pseudo-largest") for r in (2, 4)]
    clients = {row.extra["client"] for row in rows if row.metric == "bytes_up"}
    assert clients == {None, 0, 1, 2, 3, 4, 5}
    total = [row.value for row in rows if row.metric == "bytes_up" and row.extra["client"] is None]
    assert total[3] < total[1]  # withheld values are not sent
    assert total[0] < total[1]


def test_the_hash_of_the_data_is_in_the_run(attacked, tmp_path):
    """Of the examples that were used: the name of a data set does not say which files it had."""
    data, _ = load_data(read(Federate, None, {"examples": 200}))
    assert json.loads((attacked / "run.json").read_text())["data_sha256"] == data.key
    flags = ["--out", str(tmp_path / "run"), "--targets", "1", "--attack", "ig:iterations=1:tv=0"]
    assert main(["invert", *flags]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data_sha256"] == load("digits").key


def test_what_the_paper_leaves_unstated_is_in_every_row(tmp_path):
    more = ["--defense", "priprune:step=.1", "--rounds", "1", "--base-pruning", "snip"]
    assert main(["federate", "--out", str(tmp_path / "run"), *TINY, *more]) == 0
    for row in load_rows(tmp_path / "run"):
        assert row.extra["settings"].startswith("snip: rate=0.3; priprune: accuracy=5.0, ")
        assert all(
            each in row.extra["settings"] for each in ("alpha=0.5", "step=0.1", "temperature=5.0", "cooling=0.965")
        )


def test_attacks_inside_the_run(attacked):
    rows = load_rows(attacked)
    found = {(row.attack, row.extra["round"]) for row in rows if row.metric == "psnr"}
    assert found == {("ig:iterations=3", 2), ("ig:iterations=3", 4)}
    for row in (row for row in rows if row.attack is not None):
        assert isinstance(row.extra["client"], int) and row.extra["update"] == "weights after 1 local step"
    assert any(figure["kind"] == "picture" for figure in load_figures(attacked))


PARTS = ["--submodels", "none,heterofl", "--model", "mapp-cnn-8", "--rounds", "1", "--clients", "4", "--per-round", "2"]
PARTS += ["--batch-size", "32", "--set", "examples=200"]
TWO = [(Federation, [*TINY, "--defense", "none,pseudo-largest"]), (SubmodelFederation, PARTS)]


@pytest.mark.parametrize(("kind", "several"), TWO)
def test_a_finished_federation_is_let_go_before_the_next(tmp_path, monkeypatch, kind, several):
    before, begin, there = [], kind.__init__, []

    def begun(self, *given, **more):
        there.append([each() for each in before])
        begin(self, *given, **more)
        before.append(weakref.ref(self))

    monkeypatch.setattr(kind, "__init__", begun)
    gc.disable()
    try:
        assert main(["federate", "--out", str(tmp_path / "run"), *several]) == 0
    finally:
        gc.enable()
    assert there == [[], [None]]


def test_the_page(attacked):
    page = (attacked / "report.html").read_text()
    assert 'id="federated"' in page and "pseudo-largest" in page
    assert "test accuracy over rounds" in page and "PSNR of reconstructions over rounds" in page
    assert not (attacked / "unfinished").exists()


def test_started_again_it_computes_nothing_and_says_the_same(attacked, capsys, monkeypatch):
    before = select_comparable(load_rows(attacked))
    monkeypatch.setattr(
        "secateur.federated.federation.Federation.run_round", lambda *_: pytest.fail("was done already")
    )
    more = ["--base-pruning", "snip", "--defense", "none,pseudo-largest", "--attack", "ig:iterations=3"]
    assert main(["federate", "--out", str(attacked), *TINY, *more, "--attack-every", "2"]) == 0
    assert select_comparable(load_rows(attacked)) == before
    assert "MB up" in capsys.readouterr().out


def test_without_an_attack_there_is_a_page_too(tmp_path, capsys):
    command = ["federate", "--out", str(tmp_path / "run"), *TINY, "--json", "--set", "faults.drop_out=.3"]
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)
    lost = [row for row in rows if row["metric"] == "lost_clients"]
    assert lost and all("dropped out" in row["note"] for row in lost)
    assert "not attacked" in (tmp_path / "run" / "report.html").read_text()


def test_stopped_it_shows_what_it_had_and_goes_on(tmp_path, monkeypatch, attacked):
    more = ["--base-pruning", "snip", "--defense", "none,pseudo-largest", "--attack", "ig:iterations=3"]
    command = ["federate", "--out", str(tmp_path / "run"), *TINY, *more, "--attack-every", "2"]
    whole = Federation.run_round

    def stopping(self, number):
        if number == 4:
            raise KeyboardInterrupt
        return whole(self, number)

    monkeypatch.setattr(Federation, "run_round", stopping)
    assert main(command) == 130
    assert {row.extra["round"] for row in load_rows(tmp_path / "run")} == {2}
    assert "test accuracy" in (tmp_path / "run" / "report.html").read_text()
    monkeypatch.setattr(Federation, "run_round", whole)
    assert main(command) == 0
    assert select_comparable(load_rows(tmp_path / "run")) == select_comparable(load_rows(attacked))


def test_a_dry_run_says_what_it_would_do(tmp_path, capsys):
    assert main(["federate", "--out", str(tmp_path / "run"), *TINY, "--dry-run"]) == 0
    assert "6 clients (iid)" in capsys.readouterr().out and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("given", "each_round"), [({}, 10), ({"clients": 3}, 3), ({"clients": 30}, 10)])
def test_where_fewer_clients_are_than_a_usual_round_has_all_take_part(given, each_round):
    assert read(Federate, None, given).per_round == each_round
    assert read(Federate, None, given | {"per_round": 2}).per_round == 2


def test_it_is_said_where_withheld_zeros_count(tmp_path, capsys):
    told = "what pseudo-largest withholds counts as 0 in the average"
    for averaging, defense, there in (("weighted", "none,pseudo-largest", True), ("coverage", "pseudo-largest", False)):
        more = ["--averaging", averaging, "--defense", defense, "--dry-run"]
        assert main(["federate", "--out", str(tmp_path / "run"), *TINY, *more]) == 0
        assert (told in capsys.readouterr().out) == there
    usual = ["federate", "--out", str(tmp_path / "run"), *TINY, "--dry-run", "--defense"]
    assert main([*usual, "priprune"]) == main([*usual, "none,dgp", "--averaging", "weighted"]) == 0
    told = capsys.readouterr().out
    assert "counts as 0" not in told and "priprune: its lambdas are for millions of weights" in told
    assert main([*usual, "priprune", "--averaging", "uniform"]) == 0
    assert "what priprune withholds counts as 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--base-pruning", "snipp"], "snip"),
        (["--base-pruning", "snip:rate=1"], "base_pruning.snip.rate: 1.0 is not allowed"),
        (["--defense", "priprune:alpha=2"], "defense.priprune.alpha: 2.0 is not allowed"),
        (["--defense", "ppb"], "acts on"),
        (
            ["--defense", "adgp+error-feedback"],
            "adgp lets one client choose the positions of all clients; use dgp",
        ),
        (
            ["--defense", "dgp+nope"],
            "Allowed: dgp, distributed-dp, dp, error-feedback, largest, mix, noise, none, outpost, priprune, p",
        ),
        (["--attack", "ig,rob"], "apart"),
        (["--attack", "ig", "--local-epochs", "1"], "cannot be combined with local_epochs"),
        (["--attack-every", "2"], "attack"),
        (["--attack", "ig", "--attack-every", "9"], "4 rounds"),
        (["--attack", "ig", "--attack-history", "5"], "attack_history: 5 is not allowed; there are 4 rounds"),
        (["--attack", "rob", "--iterations", "5"], "iterations: rob does not have it"),
        (["--per-round", "7"], "must be in [1, 6]"),
        (["--clients", "500"], "no rows are left"),
        (["--partition", "writer"], "leave clients out"),
        (["--method", "fedsgd", "--defense", "largest"], "fedavg"),
        (
            ["--defense", "none,dgp", "--base-pruning", "snip,feddst"],
            "feddst with dgp: its clients choose",
        ),
        (["--model", "digits-cnn", "--defense", "priprune"], "PriPrune does not support BatchNorm"),
        (
            ["--model", "digits-cnn", "--defense", "priprune+dp", "--local-steps", "1"],
            "PriPrune does not support BatchNorm",
        ),
        (["--model", "mlp", "--defense", "priprune"], "dropout"),
        (["--set", "faults.drop_out=3"], "drop_out"),
        (["--set", "faults.deadline=.001"], "every client"),
        (["--set", "execution=ray"], "execution"),
        (["--set", "train.epochs=3"], "learning_rate"),
        (["--rounds", "0"], "rounds"),
        (["--averaging", "mean"], "weighted"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(tmp_path, capsys, wrong, said):
    assert main(["federate", "--out", str(tmp_path / "run"), *TINY, *wrong]) == 2
    told = capsys.readouterr().err
    assert told.startswith("secateur: ") and said in told and told.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("partition", ["iid", "dirichlet-labels", "dirichlet-sizes"])
def test_partitions(partition):
    config = read(Federate, None, {"partition": partition, "clients": 4, "alpha": 5})
    data, _ = load_data(config)
    parts = shares_of(config, data, 0)
    assert len(parts) == 4 and sorted(torch.cat([*parts]).tolist()) == list(range(data.train_size))
    assert data.train_size < len(data.inputs)  # a part is held out


def test_there_may_be_more_clients_than_rows():
    config = read(Federate, None, {"partition": "shared", "clients": 100_000, "client_rows": 3})
    data, _ = load_data(config)
    parts = shares_of(config, data, 0)
    assert len(parts) == 100_000 and all(len(set(parts[client].tolist())) == 3 for client in range(0, 100_000, 97))
    assert len({tuple(sorted(parts[client].tolist())) for client in range(2000)}) > 1990
    assert parts.rows.unique().tolist() == list(range(data.train_size))


def test_iterations_are_of_the_attacks_that_have_any():
    attacks = read(Federate, None, {"attack": ["ig", "r-gap"], "iterations": 7}).attacks
    assert [str(each) for each in attacks] == ["ig:iterations=7", "r-gap"]
    assert read(Federate, None, {"iterations": 7}).attacks == []


def test_writers_must_be_known():
    config = read(Federate, None, {"partition": "writer"})
    with pytest.raises(secateur.WrongInput, match="writers"):
        shares_of(config, load_data(config)[0], 0)


@pytest.mark.parametrize(
    "kind, flag", [("base-prunings", "base-pruning"), ("defenses", "defense"), ("attacks", "attack")]
)
def test_the_help_tells_where_the_names_are(kind, flag, capsys):
    assert main(["federate", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    examples = re.search(rf"--{flag} [\w -]+, such as ([\w, -]+) \(secateur list {kind}\)", said)[1].split(", ")
    assert main(["list", kind, "--json"]) == 0
    assert set(examples) <= {row["name"] for row in json.loads(capsys.readouterr().out)}


def test_list_base_prunings(capsys):
    assert main(["list", "base-prunings", "--json"]) == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert {"none", "random", "snip", "synflow", "grasp", "feddst", "prunefl"} <= names


def test_the_list_tells_which_defenses_a_federation_has(capsys):
    assert main(["list", "defenses"]) == 0
    tables = re.split(r"\n(?=of )", "\n" + capsys.readouterr().out)
    names = {table.splitlines()[0]: re.findall(r"^ (\S+)", table, re.M)[1:] for table in tables if table.strip()}
    for title, found in names.items():
        for name in found:
            try:
                defense_of_clients("error-feedback+dgp" if name == "error-feedback" else name)
            except secateur.WrongInput:
                assert "secateur federate" not in title, name
            else:
                assert "secateur federate" in title or name == "none", name


def test_from_python_it_is_said_too_where_lambdas_are_for_a_larger_network(rng, caplog):
    examples = torch.rand(20, 1, 6, 6, generator=rng), torch.arange(20) % 3
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    for defense in ("priprune", "priprune:sharing=2"):
        secateur.federate(net, examples, clients=2, rounds=1, local=LocalTraining(1, None, 2, 0.1), defense=defense)
    (told,) = [record.getMessage() for record in caplog.records if "lambdas" in record.getMessage()]
    assert told.startswith("priprune: its lambdas are for millions of weights, and would withhold much of 108")


def test_a_test_part_that_a_network_refuses_is_no_accuracy_of_0():
    class Refuses(nn.Linear):
        def forward(self, inputs):
            raise WrongInput("inputs", "are not mine")

    net = Refuses(4, 3)
    judge = ServerEvaluation(net, Batch(torch.rand(2, 4), torch.tensor([0, 1])), cross_entropy)
    with pytest.raises(WrongInput, match="are not mine"):
        judge(net.state_dict())


def test_from_python(tmp_path, rng):
    inputs, labels = torch.rand(48, 1, 6, 6, generator=rng), torch.arange(48) % 3
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    seen = []
    made = secateur.federate(
        net,
        (inputs[:40], labels[:40]),
        (inputs[40:], labels[40:]),
        clients=4,
        rounds=3,
        local=LocalTraining(1, None, 2, 0.1),
        base_pruning="random",
        defense="largest",
        attack="ig:iterations=2",
        observers=[(2, seen.append)],
        averaging="coverage",
        evaluate_every=3,
    )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert (made.state["1.weight"] == 0).sum() == int(0.3 * 108)
    assert {each.round for each in seen} == {2} and len(seen) == 4
    assert {row.extra["round"] for row in made.rows if row.metric == "psnr"} == {3}
    assert "federated" in Path(made.write(tmp_path / "page.html")).read_text()
    made = secateur.federate(net, (inputs[:40], labels[:40]), (inputs[40:], labels[40:]), rounds=2, membership="yeom")
    assert {row.attack for row in made.rows if row.metric == "auc"} == {"yeom"}
    with pytest.raises(secateur.WrongInput, match="lira"):
        secateur.federate(net, (inputs[:40], labels[:40]), (inputs[40:], labels[40:]), membership="samia")
    with pytest.raises(secateur.WrongInput, match="one label for each input"):
        secateur.federate(net, (inputs, labels[:3]))


class Drawing(nn.Module):
    """Draws in its forward, by a function that no module shows."""

    def __init__(self, draw):
        super().__init__()
        self.last, self.draw = nn.Linear(36, 3), draw

    def forward(self, inputs):
        return self.last(self.draw(inputs.flatten(1), 0.5, self.training))


@pytest.mark.parametrize("defense", ["priprune", "priprune+dp"])
@pytest.mark.parametrize("draw, said", [(dropout, "random layers"), (alpha_dropout, "could not be repeated")])
def test_a_network_that_draws_by_a_function_is_refused_where_a_turn_does_not_follow(defense, draw, said, rng):
    train = torch.rand(40, 1, 6, 6, generator=rng), torch.arange(40) % 3
    terms = {"clients": 4, "rounds": 1, "local": LocalTraining(1, None, 2, 0.1)}
    with pytest.raises(secateur.WrongInput, match=said):
        secateur.federate(Drawing(draw), train, defense=defense, **terms)
    if draw is dropout:
        secateur.federate(Drawing(draw), train, defense="pseudo-largest", **terms)  # others follow what it draws


def test_clients_whose_batches_repeat_rows_are_named():
    config = read(Federate, None, {"clients": 100, "batch_size": 20, "local_steps": 1})
    (text,) = cautions(config, load("digits"))
    assert text.startswith("100 of 100 clients have fewer rows than batch_size 20 (the smallest has 17); their batches")
    assert not cautions(read(Federate, None, {"clients": 10, "batch_size": 20}), load("digits"))


def test_python_and_the_command_have_one_learning_rate():
    assert LocalTraining().learning_rate == read(Federate, None, {}).learning_rate
