from secateur.config import Audit, read
from secateur.experiments.threat_models import Compression, grid, list_matchups


def config(**flags):
    return read(Audit, None, {"pruner": "l1-unstructured,slimming", "sparsity": ".5,.7", **flags})


def test_known_attacks_originals_first_and_slimmings_own():
    found = list(list_matchups(config(), seed=0))
    assert [duel.labels["pruner"] for duel in found] == ["none", "none", *["l1-unstructured"] * 2, *["slimming"] * 2]
    assert [duel.labels["extra"].get("original") for duel in found[:2]] == [None, "slimming"]
    assert all(duel.victim == duel.attacker for duel in found)


def test_a_non_adaptive_attacker_takes_basic_and_an_adaptive_one_the_defense():
    for adaptive, expected in ((False, "basic"), (True, "ppb")):
        found = [d for d in list_matchups(config(defense="ppb", adaptive=adaptive), 0) if d.victim.pruner]
        assert {str(duel.victim.defense) for duel in found} == {"ppb"}
        assert {str(duel.attacker.defense) for duel in found} == {expected}
        assert {duel.labels["adaptive"] for duel in found} == {adaptive}


def test_unknown_sparsity_is_every_pair_with_the_unpruned_target():
    found = list(list_matchups(config(pruner="l1-unstructured", protocol="unknown-sparsity"), 0))
    pairs = {(duel.victim.sparsity, duel.attacker.sparsity) for duel in found}
    assert pairs == {(a, b) for a in (0, 0.5, 0.7) for b in (0, 0.5, 0.7)}
    assert all(duel.extra["known"] == (duel.victim.sparsity == duel.attacker.sparsity) for duel in found)


def test_unknown_draws_twenty_pairs_and_attacks_each_with_and_without_knowing():
    settings = config(protocol="unknown")
    found = list(list_matchups(settings, 0))
    assert len(found) == 40
    assert {duel.extra["experiment"] for duel in found} == set(range(20))
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first.victim == second.victim and first.attacker == first.victim
    assert found == list(list_matchups(settings, 0)) != list(list_matchups(settings, 1))
    assert {duel.victim for duel in found} <= set(grid(settings))


def test_a_defense_from_the_start_has_its_own_original():
    found = list(list_matchups(config(pruner="l1-unstructured", sparsity=".5", defense="basic,dp-sgd-scratch"), 0))
    assert [str(duel.victim.defense) for duel in found] == ["basic", "dp-sgd-scratch", "basic", "dp-sgd-scratch"]
    assert found[0].victim == Compression()


def test_nothing_to_prune_audits_the_original_alone():
    assert [duel.victim for duel in list_matchups(config(pruner="none"), 0)] == [Compression()]


def test_a_private_training_is_attacked_although_nothing_is_pruned():
    victims = [duel.victim for duel in list_matchups(config(pruner="none", defense="ppb,dp-sgd-scratch"), 0)]
    assert [str(victim.defense) for victim in victims] == ["basic", "dp-sgd-scratch"]


def test_sparsity_zero_is_the_original_and_comes_once():
    found = list(list_matchups(config(pruner="l1-unstructured,snip", sparsity="0,.5"), 0))
    assert [duel.labels["pruner"] for duel in found] == ["none", "l1-unstructured", "snip"]
