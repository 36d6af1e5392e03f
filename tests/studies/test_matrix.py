"""The matrix: cells of experiments on one ground, refusals with their reasons, parts that are joined into one page."""

from dataclasses import replace

import pytest
import torch

from secateur import catalogue
from secateur.config import choice
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import read_mode
from secateur.report.heatmap import BY_KEY, CELL, REFUSED, build_heatmaps
from secateur.report.page import write_page
from secateur.runs.folder import Run, load_rows
from secateur.seeding import derive
from secateur.studies import read_data
from secateur.studies.matrix import measures
from secateur.studies.matrix.ground import MatrixSetting, MatrixStep, draw_ground
from secateur.studies.matrix.measures import train_reference
from secateur.studies.matrix.references import ProtectedContext
from secateur.studies.study import read_scales, reproduce

TINY = read_scales("matrix")["tiny"]


def setting(seed=0, network="digits-cnn", **step):
    data = draw_ground(load("digits", None, False), TINY.members, seed)
    named = MatrixStep(network, "here", "row", **step)
    return MatrixSetting(None, TINY, {}, torch.device("cpu"), seed, named, data, {})


def measure(out, *parts, seeds="0,"):
    options = {"seeds": seeds, "device": "cpu"}
    reproduce("matrix", "tiny", options, list(parts), out)
    return [row for row in load_rows(out) if row.metric in (CELL, REFUSED)]


def test_a_seed_draws_members_and_as_many_others_and_both_change_with_it():
    data, one = load("digits", None, False), draw_ground(load("digits", None, False), 50, 0)
    assert (one.train_size, len(one.inputs)) == (50, 100)
    assert torch.equal(one.inputs, draw_ground(data, 50, 0).inputs)
    assert not torch.equal(one.inputs, draw_ground(data, 50, 1).inputs)
    with pytest.raises(WrongInput, match="members: 1000 and as many non-members are more than digits has"):
        draw_ground(data, 1000, 0)


def test_reference_models_are_trained_as_the_federation_is(tmp_path):
    audit = setting().audit(tmp_path / "model.safetensors")
    assert audit.train.batch_size == TINY.clients * TINY.batch_size
    assert audit.train.epochs * TINY.members == TINY.rounds * audit.train.batch_size
    assert (audit.train.optimiser, audit.train.learning_rate, audit.train.momentum) == ("sgd", TINY.learning_rate, 0)
    assert audit.adaptive and audit.in_out == TINY.in_out


def test_every_mode_of_the_catalogue_is_an_attack():
    for name in ("dgp", "largest", "noise"):
        plain, *informed = setting(defense=name).list_attacks("sgi:iterations=3")
        assert plain == "sgi:iterations=3"
        modes = set(catalogue.find("defense", name).info["adaptive"]) - {"fill"}  # sgi tampers with no model
        assert len(informed) == len(modes)
        assert all(str(choice("inversion", attack)) == attack for attack in informed), "named as in rows"
    assert "sgi:adaptive=support:iterations=3" in setting(defense="dgp").list_attacks("sgi:iterations=3")
    assert setting(defense="dgp").list_attacks("rob", ["mask"]) == ["rob"]
    adapts = catalogue.find("inversion", "rob").info["adapts"]
    assert setting(defense="random").list_attacks("rob", adapts) == ["rob", "rob:adaptive=fill"]


def test_priprune_shares_by_the_number_of_weights():
    small, large = (setting(network=name, defense="priprune").defense for name in ("digits-cnn", "conv-1"))
    shares = [float(text.rpartition("=")[2]) for text in (small, large)]
    assert shares[0] > shares[1] > 0
    assert setting(defense="priprune:sharing=2.0").defense == "priprune:sharing=2.0"


def test_refusals_name_columns_and_groups_of_the_study():
    study = catalogue.find("study", "matrix").make()
    groups = {name for step in study.read_steps(MatrixStep, networks=["conv-2"]) for name in (step.group, step.row)}
    reasons = {name: texts for name, texts in read_data("matrix", "refusals").items() if name != "about"}
    assert reasons.keys() <= groups
    assert all(columns.keys() <= BY_KEY.keys() for columns in reasons.values())


def test_a_pair_that_is_not_measured_is_refused_by_the_data_and_another_by_the_tool(tmp_path):
    rows = measure(tmp_path, "rows=ppb,priprune", "measures=inversion")
    by = {(row.extra["row"], row.extra["column"]): (row.extra["by"], row.note) for row in rows}
    assert all(row.metric == REFUSED and row.value is None for row in rows)
    said, reason = by["ppb", "strongest"]
    assert said == "the matrix" and "clients train without it" in reason
    said, reason = by["priprune", "inversion"]
    assert (said, reason) == (
        "secateur",
        "defense: PriPrune does not support BatchNorm; use a model without, such as conv-2",
    )
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="refused" title=') == 4 and "does not support BatchNorm" in page


def test_parts_of_a_matrix_join_into_one_page(tmp_path):
    for name, parts in (("a", "rows=none"), ("b", "rows=dgp")):
        rows = measure(tmp_path / name, parts, "measures=active")
        assert all(row.metric == CELL and 0 < row.value <= 60 for row in rows)
    page = write_page([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text()
    assert page.count('<th scope="row">') == 2
    assert {row.attack for row in rows} == {"rob:bins=16", "rob:adaptive=support:bins=16"}
    assert page.count("<img") == 2 * 4 * 2, "truths and the active server's pictures of both rows"


def test_a_defense_meets_reference_models_that_imitate_it(tmp_path):
    rows = measure(tmp_path, "rows=none,random,ats", "measures=training", "rounds=2")
    final = [row for row in rows if row.extra["column"] == "final-rmia"]
    asked = {name: [row for row in final if row.extra["row"] == name] for name in ("none", "random", "ats")}
    assert [len(asked[name]) for name in asked] == [1, 2, 2], "an undefended federation is imitated already"
    imitating, plain = asked["random"]
    assert imitating.extra["references"] == "reference models under the defense" and "references" not in plain.extra
    assert imitating.value != plain.value, "other models"
    assert not any("unmet" in row.extra for row in final)
    (cell,) = (row.cells["final-rmia"] for row in build_heatmaps(rows)[0].rows if row.name == "random")
    assert cell.estimate.value == max(imitating.value, plain.value)
    assert {line[0] for line in cell.list_rows()} == {"rmia", "rmia, reference models under the defense"}


def test_a_network_with_a_part_of_the_defense_is_attacked_with_that_part(tmp_path):
    rows = measure(tmp_path, "rows=precode", "measures=training", "rounds=2")
    final = [row for row in rows if row.extra["column"].startswith("final")]
    references = [row.extra.get("references") for row in final]
    assert references == ["reference models under the defense"] * 2 + [None] * 2
    assert all(row.metric == CELL and 0 <= row.value <= 1 for row in final)
    one = setting(defense="precode")
    context = ProtectedContext(None, one.audit(tmp_path), one.data, one.device, one.seed, defense=one.defense)
    names = [name for name, _ in context.build(derive(0, "check")).named_parameters()]
    assert sum("encoder" in name for name in names) == 2, "PRECODE's bottleneck"
    plain = replace(context, defense="dgp").build(derive(0, "check"))
    assert not any("encoder" in name for name, _ in plain.named_parameters())


def test_a_reference_model_is_trained_under_the_defense():
    ground = replace(setting().data, train_size=60)
    plain, one, same, other = (
        train_reference(replace(setting(defense=name), data=ground, seed=seed))
        for name, seed in (("none", 7), ("random", 7), ("random", 7), ("random", 8))
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], plain[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("factor", [float("nan"), 1e37])  # finite weights may have infinite answers
def test_a_reference_federation_that_diverges_is_tried_again(factor, tmp_path, monkeypatch):
    seeds = []

    def diverge_at_first(one):
        seeds.append(one.seed)
        model = train_reference(one)
        return {name: value * (factor if len(seeds) == 1 else 1) for name, value in model.items()}

    monkeypatch.setattr(measures, "train_reference", diverge_at_first)
    rows = measure(tmp_path, "rows=random", "measures=training", "rounds=2")
    assert len(seeds) == TINY.in_out + 1 and len(set(seeds)) == len(seeds), "one more, from other first weights"
    assert not any("unmet" in row.extra for row in rows)


def test_without_imitation_the_cells_of_a_defense_are_marked(tmp_path):
    rows = measure(tmp_path, "rows=random", "measures=training", "rounds=2", "imitates=false")
    final = [row for row in rows if row.extra["column"].startswith("final")]
    assert [row.extra["unmet"] for row in final] == ["no reference model imitates the defense"] * 2


def test_pictures_meet_the_smooth_inversion_that_knows_as_much_as_sgi(tmp_path):
    rows = measure(tmp_path, "rows=heterofl,random", "measures=inversion")
    met = {name: [row.attack for row in rows if row.extra["row"] == name] for name in ("heterofl", "random")}
    assert sum(text.startswith("ig-smooth:") for text in met["heterofl"]) == 1, "it unrolls the step of Adam"
    assert [read_mode(text) for text in met["random"] if text.startswith("ig-smooth")] == ["none", "support+follows"]
    cells = {row.name: row.cells["strongest"] for row in build_heatmaps(rows)[0].rows}
    assert not cells["heterofl"].unmet and not cells["random"].unmet


def test_one_family_of_inversions_can_be_measured_alone(tmp_path):
    rows = measure(tmp_path, "rows=dgp", "measures=inversion", "inversions=ig-smooth")
    assert {row.extra["column"] for row in rows} == {"strongest"}, "the plain attacker is sgi"
    assert {read_mode(row.attack) for row in rows} == {"none", "support", "reapply"}


def test_updates_of_sub_models_meet_shadow_federations(tmp_path):
    def measure_updates(name, *parts):
        rows = measure(tmp_path / name, "rows=heterofl", "measures=training", "rounds=4", "members=320", *parts)
        return {row.attack: row for row in rows if row.extra["column"] == "updates"}

    federations, clients = measure_updates("federations"), measure_updates("clients", "shadow_federations=0")
    assert federations.keys() == clients.keys() == {"yeom", "lira", "rmia", "rmia:gamma=1.0"}
    assert federations["yeom"].value == clients["yeom"].value, "the same federation"
    assert federations["lira"].value != clients["lira"].value, "other shadows"
    assert federations["lira"].extra["shadows"] == "4 federations, all rounds"
    assert all("on 8 shadow federations" in row.extra["unmet"] for row in (*federations.values(), *clients.values()))


def test_a_row_without_a_defense_is_inverted_where_rows_are_that_no_federation_takes(tmp_path):
    rows = measure(tmp_path, "rows=none (first round),ppb in clients", "measures=inversion,active")
    assert all(row.metric == CELL and "outside" in row.extra for row in rows)
    greys = {row.extra["row"]: row.extra["psnr_grey"] for row in rows if row.extra["column"] == "inversion"}
    assert len(greys) == 2 and len(set(greys.values())) == 1, "the same pictures"


def test_ppb_as_the_loss_of_clients_is_attacked_and_trained(tmp_path):
    rows = measure(tmp_path, "rows=ppb in clients", "rounds=2")
    refused = {row.extra["column"] for row in rows if row.metric == REFUSED}
    assert refused == {"updates"}, "no federation takes the loss"
    strongest = [row.attack for row in rows if row.extra["column"] == "strongest"]
    assert list(map(read_mode, strongest)) == ["none", "loss"] * 2, "by sgi and by ig-smooth"
    assert {row.extra["column"] for row in rows} == BY_KEY.keys()


def test_collaborative_training_under_ppb_takes_its_loss(tmp_path):
    (tmp_path / "artifacts").mkdir()
    run = Run(tmp_path)  # one run, so that the stages must differ too

    def train(defense):
        return measures._collaborate(replace(setting(defense=defense), run=run)).state

    plain, weightless, balanced = map(train, ("none", "ppb:strength=0", "ppb"))
    assert all(torch.equal(plain[name], weightless[name]) for name in plain)
    assert any(not torch.equal(plain[name], balanced[name]) for name in plain)
