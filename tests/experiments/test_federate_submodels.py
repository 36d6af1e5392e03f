"""`secateur federate --submodels` and `secateur.federate(submodels=...)`: rows, resuming, the page, what is refused."""

import pytest
import torch

import secateur
import tiny_submodels as tiny
from secateur.cli import main
from secateur.config import Federate, read
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import name_missing_clients, read_unmet
from secateur.federated.build import build_submodel_spec, load_data, shares_of
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

TINY = ["federate", "--model", "digits-cnn", "--rounds", "3", "--clients", "5", "--batch-size", "16"]
TINY += ["--set", "examples=200", "--evaluate-every", "2", "--partition", "iid"]
STEP = ["--submodels", "mapp-fl", "--local-steps", "1", "--set", "batch_size=2"]
FLAGS = ["--submodels", "mapp-fl,none,local", "--large-clients", "1", "--attack", "none"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("submodels") / "run"
    assert main([*TINY, *FLAGS, "--out", str(out)]) == 0
    return out


def test_rows_carry_rule_width_and_round(finished):
    rows = [row for row in load_rows(finished) if row.metric == "test_accuracy" and row.attack is None]
    assert [row.extra["submodels"] for row in rows if row.extra["client"] is None] == ["mapp-fl"] * 2 + ["none"] * 2
    clients = [row.extra for row in rows if row.extra["client"] is not None]
    assert [(each["submodels"], each["client"], each["rate"]) for each in clients] == [
        *(("mapp-fl", client, 1.0 if client == 0 else 0.5) for client in range(5)),
        *(("none", client, 1.0) for client in range(5)),
        *(("local", client, 1.0 if client == 0 else 0.5) for client in range(5)),
    ]
    assert {each["round"] for each in clients} == {3}
    sizes = [row for row in load_rows(finished) if row.metric == "bytes_up" and row.extra["submodels"] == "mapp-fl"]
    by_client = {row.extra["client"]: row.value for row in sizes if row.extra["round"] == 3}
    assert by_client[0] > 2 * by_client[1] and by_client[None] == sum(by_client[client] for client in range(5))


def test_the_terminal_and_the_page(finished, capsys):
    assert main([*TINY, *FLAGS, "--out", str(finished)]) == 0  # nothing is left to do
    said = capsys.readouterr().out
    assert "mapp-fl" in said and "accuracy" in said and (finished / "report.html").exists()


def test_what_the_federations_did_not_meet_is_said_in_rows_terminal_and_page(tmp_path, capsys):
    flags = ["--submodels", "mapp-fl,none", "--attack", "yeom", "--set", "examples=600"]
    assert main([*TINY, *flags, "--out", str(tmp_path)]) == 0
    aucs = [row for row in load_rows(tmp_path) if row.metric == "auc"]
    unmet = name_missing_clients(["yeom"])
    assert aucs and all(read_unmet(row.note) == unmet for row in aucs)
    strongest = unmet.removeprefix("did not meet ")
    sentence = f"mapp-fl, fedavg did not meet the strongest attacker known: {strongest}."
    assert sentence in capsys.readouterr().out and sentence in (tmp_path / "report.html").read_text()


def test_the_runs_own_file_starts_it_again(finished, tmp_path):
    assert main(["federate", str(finished / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    assert select_comparable(load_rows(tmp_path / "again")) == select_comparable(load_rows(finished))


def test_a_run_that_was_killed_goes_on_to_equal_rows(finished, tmp_path, monkeypatch):
    begin, begun = SubmodelFederation.begin, []

    def stopping(self, number):
        begun.append(number)
        if number == 3 and len(begun) == 3:
            raise KeyboardInterrupt
        return begin(self, number)

    monkeypatch.setattr(SubmodelFederation, "begin", stopping)
    monkeypatch.setattr("secateur.federated.checkpoint.EVERY", 0.0)
    out = ["--out", str(tmp_path / "killed")]
    assert main([*TINY, *FLAGS, *out]) == 130
    assert main([*TINY, *FLAGS, *out]) == 0
    assert begun[:4] in ([1, 2, 3, 3], [1, 2, 3, 2])  # not from the start
    assert select_comparable(load_rows(tmp_path / "killed")) == select_comparable(load_rows(finished))


def test_what_is_not_given_is_the_papers():
    config = read(Federate, None, {"submodels": "mapp-fl"})
    assert (config.model, config.rounds, config.clients, config.per_round) == ("mapp-cnn-16", 150, 10, 10)
    assert (config.partition, config.local_epochs, config.batch_size) == ("dirichlet-sizes", 1, 128)
    assert (config.learning_rate, config.averaging, config.uncovered) == (1e-3, "uniform", "keep")
    assert read(Federate, None, {}).model == "conv-2"  # a federation without sub-models is as it was


def test_repeats_have_equal_sizes_and_other_pictures():
    config = read(Federate, None, {"submodels": "mapp-fl", "seeds": "2"})
    data, _ = load_data(config)
    one, two = (shares_of(config, data, seed) for seed in (0, 1))
    assert [len(rows) for rows in one] == [len(rows) for rows in two] and one[0].tolist() != two[0].tolist()
    fresh = read(Federate, None, {"submodels": "mapp-fl", "redraw_sizes": True})
    assert [len(rows) for rows in shares_of(fresh, data, 1)] != [len(rows) for rows in one]
    terms = build_submodel_spec(config, data, 0, config.submodels[0], config.defense[0])
    assert list(terms.rates) == [1.0, 1.0, *[0.5] * 8]


def test_clients_of_many_writers():
    writers = torch.arange(170).repeat_interleave(2)
    data = Dataset("written", torch.zeros(340, 1, 8, 8), torch.arange(340) % 3, 3, 340, writers=writers)
    config = read(Federate, None, {"submodels": "mapp-fl", "partition": "writer-groups"})
    sizes = [len(rows) for rows in shares_of(config, data, 0)]
    assert sizes == [2 * number for number in (35, 27, 24, 21, 18, 15, 12, 9, 6, 3)]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--submodels", "mapp-fl", "--large-clients", "11"], "large_clients: 11 is not allowed; must be in [0, 10]"),
        (["--submodels", "mapp-fl:groups=16", "--model", "mapp-cnn-8"], "groups: 16 are more than the 8 channels"),
        (["--submodels", "heterofl", "--client-widths", ".01"], "leaves the layer 0 without channels"),
        (["--submodels", "heterofl", "--client-widths", "1.5"], "client_widths: 1.5 is not allowed"),
        (["--large-clients", "3"], "submodels: must be set with large_clients"),
        (["--submodels", "mapp-fl", "--base-pruning", "snip"], "base_pruning: cannot be combined with submodels"),
        (
            ["--submodels", "mapp-fl", "--local-steps", "2", "--local-epochs", "2"],
            "cannot be combined with local_epochs",
        ),
        (["--submodels", "mapp-fl", "--membership", "yeom"], "cannot be combined with submodels; use attack"),
        (
            ["--submodels", "mapp-fl", "--advise", "--attack", "yeom,lira"],
            "attack: 2 attacks are set; advise needs one",
        ),
        (["--submodels", "mapp-fl", "--defense", "soteria"], "cannot be combined with sub-models"),
        (["--submodels", "mapp-fl", "--averaging", "coverage"], "averaging"),
        (["--submodels", "map-fl"], "submodels: 'map-fl' is not known; did you mean 'mapp-fl'"),
        (["--submodels", "heterofl", "--set", "examples=300"], "has 1, and needs 2 rows for BatchNorm"),
        (["--submodels", "mapp-fl", "--attack-clients", "2"], "attack_clients: is of inversion attacks"),
        (["--submodels", "mapp-fl", "--attack-every", "5"], "attack_every: is of inversion attacks"),
        (["--submodels", "mapp-fl", "--attack-at", "5"], "attack_at: is of inversion attacks"),
        (["--submodels", "mapp-fl", "--labels", "oracle"], "labels: is of inversion attacks"),
        (["--submodels", "mapp-fl", "--attack", "ig"], "too many to reconstruct; use local_steps"),
        ([*STEP, "--attack", "rob"], "rob sends another model"),
        ([*STEP, "--attack", "sgi:follows=true"], "leave follows out"),
        ([*STEP, "--attack", "sgi:magnitudes=true"], "clients send none"),
        ([*STEP, "--attack", "ig", "--attack-clients", "99,"], "client 99 is not allowed"),
        ([*STEP, "--attack", "ig", "--advise"], "advise needs one"),
        (["--submodels", ","], "submodels: is empty; use rules such as mapp-fl"),
        (["--submodels", "mapp-fl,none", "--advise"], "advise: none has no models of other sizes to attack"),
        (["--submodels", "heterofl", "--advise", "--client-widths", ".5,.01"], "leaves the layer 0 without channels"),
    ],
)
def test_wrong_input_gets_one_sentence(flags, sentence, capsys):
    assert main(["federate", *flags, "--dry-run"]) == 2
    assert sentence in capsys.readouterr().err


def test_help_says_where_the_rules_are(capsys):
    assert main(["federate", "--help"]) == 0
    assert "(secateur list submodels)" in " ".join(capsys.readouterr().out.split())


def test_the_plan_of_advice_is_of_pilots(capsys):
    flags = ["--submodels", "mapp-fl", "--advise", "--client-widths", ".5,.25", "--set", "pilot_draws=3"]
    assert main(["federate", *flags, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "each with the whole model, 0.5 of the channels, 0.25 of the channels in turn" in said
    assert "9 pilots of 10 rounds of" in said


def test_from_python():
    data, seen = tiny.data(), []
    train, test = (data.inputs[:75], data.labels[:75]), (data.inputs[75:], data.labels[75:])
    made = secateur.federate(
        tiny.net(dtype=None),
        train,
        test,
        submodels="mapp-fl",
        clients=5,
        large_clients=1,
        rounds=2,
        observers=[(2, seen.append)],
        attack="yeom",
        uncovered="zero",
        test_batch=10,
    )
    last = [row for row in made.rows if row.metric == "test_accuracy" and row.extra["round"] == 2]
    rounds, attacked = (
        {r.extra["client"]: r.value for r in last if ("scope" in r.extra) is yes} for yes in (False, True)
    )
    assert None in rounds and len(seen) == 5 and "0.weight" in made.state and rounds == pytest.approx(attacked)
    with pytest.raises(WrongInput, match="base_pruning"):
        secateur.federate(tiny.net(dtype=None), train, submodels="mapp-fl", base_pruning="snip")


def test_updates_of_sub_models_are_attacked_on_the_clients_network(tmp_path, capsys):
    flags = [*TINY, *STEP, "--model", "lenet-zhu", "--attack", "ig:adaptive=reapply:tv=0,yeom", "--iterations", "3"]
    flags += ["--set", "clients=3", "--set", "rounds=2", "--attack-at", "1,2", "--attack-clients", "2"]
    assert main([*flags, "--large-clients", "1", "--out", str(tmp_path / "run")]) == 0
    rows = load_rows(tmp_path / "run")
    psnr = [row for row in rows if row.metric == "psnr"]
    assert [(row.extra["round"], row.extra["client"], row.extra["rate"]) for row in psnr] == [
        *((number, client, rate) for number in (1, 2) for client, rate in ((0, 1.0), (1, 0.5)))
    ]
    assert {row.extra["update"] for row in psnr} == {"weights after 1 local step of adam"} and psnr[0].extra[
        "batch_size"
    ] == 2
    assert "its sub-model" in psnr[1].extra["knows"] and psnr[0].extra["parameters"] > 2 * psnr[1].extra["parameters"]
    assert any(row.attack == "yeom" for row in rows)
    page, said = (tmp_path / "run" / "report.html").read_text(), capsys.readouterr().out
    assert "Truth and reconstructions" in page and "reapply" in page and "reapply" in said
