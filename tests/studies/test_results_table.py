"""The page of results: every study and claim has a line, an archive fills its lines, and verdicts are computed."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from secateur.catalogue import methods
from secateur.runs.archive import write_archive
from secateur.runs.rows import Row
from secateur.studies import read_data

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("results_table", RESULTS / "table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def papers(table):
    return table.read_papers()


def test_every_study_and_every_claim_has_a_line(papers):
    studies = [item["study"] for paper in papers.values() for item in paper["items"] if "study" in item]
    known = {name for name, entry in methods("study").items() if entry.make().package in papers}
    assert sorted(studies) == sorted(known)
    for package, paper in papers.items():
        listed = {key for item in paper["items"] for key in item.get("claims", {})}
        claims = read_data(package, "claims")
        keys = {f"{part}.{name}" for part, some in claims.items() if part != "about" for name in some}
        assert listed == keys | paper["texts"].keys(), package
        by_item = {item["item"]: item.get("claims", {}) for item in paper["items"]}
        assert all(headline["claim"] in by_item[headline["item"]] for headline in paper["headlines"]), package
        asks = {key for item in paper["items"] for key in item.get("asks", {})}
        assert all(claims[key.partition(".")[0]][key.partition(".")[2]].get("hides") for key in asks), package


def audited(pruner, sparsity, accuracy, seeds=(0, 1, 2)):
    labels = {"model": "mlp", "dataset": "location", "pruner": pruner, "sparsity": sparsity, "defense": "basic"}
    return [
        Row(**labels, seed=seed, metric="test_accuracy", value=accuracy + seed / 1000, low=0.0, high=1.0)
        for seed in seeds
    ]


@pytest.fixture
def folder(table, tmp_path, monkeypatch):
    """A folder of results without rows."""
    (tmp_path / "items.json").write_text((RESULTS / "items.json").read_text())
    (tmp_path / "rows").mkdir()
    monkeypatch.setattr(table.claims, "HERE", tmp_path)
    return tmp_path


def line_of(table, words):
    lines = table.tabulate(table.gather_lines()["samia"]).splitlines()
    return next(line for line in lines if words in line)


def test_an_archive_fills_its_lines_and_a_claim_without_rows_was_not_run(table, folder):
    close = "pruned models are close to the original"
    assert line_of(table, close).endswith("| plot |  |  |  | not run |")
    rows = [*audited("none", 0.0, 0.60), *audited("l1-unstructured", 0.5, 0.61)]
    command = "secateur reproduce samia-fig6 --scale full --set shadows=1"
    write_archive(
        folder / "rows" / "fig6.jsonl.xz", rows, {"studies": ["samia-fig6"], "scale": "full", "command": command}
    )
    after = line_of(table, close)
    assert "l1-unstructured 0.5: +1.0 points" in after and "| reproduced, reduced |" in after
    assert "3 seeds; full; mlp on location; shadows=1; [rows](rows/fig6.jsonl.xz)" in after
    page = table.make_pages()[folder / "README.md"]
    assert "By figure and table: **partly** Fig. 6; **not run** Figs. 1, 4, 7, 8," in page
    assert "**Stands in part** (2): Fig. 6 (2).\n" in page and "| [SAMIA and PPB](#samia-and-ppb) | 0 | 2 |" in page
    headline = "pruning raises the membership risk at a low sparsity"
    assert f"| SAMIA and PPB | {headline} | **not run** |" in page
    tiny = {"studies": ["samia-fig6"], "scale": "tiny"}  # shows that a study runs, and measures nothing
    (folder / "rows" / "fig6.jsonl.xz").rename(folder / "fig6.jsonl.xz")
    write_archive(folder / "rows" / "tiny.jsonl.xz", rows, tiny)
    assert line_of(table, close).endswith("| not run |")
    assert table.main(["--check"]) == 1 and table.main([]) == 0 and table.main(["--check"]) == 0


def test_a_figure_is_reproduced_only_whole_and_at_full_scale(table):
    yes, small, no = (
        table.Line("Fig. 1", "a", verdict=word, full=full)
        for word, full in (("reproduced", True), ("reproduced", False), ("not", True))
    )
    undecided, absent = (table.Line("Fig. 1", "b", verdict=word) for word in ("undecided", "not run"))
    verdicts = {
        "reproduced": [yes, yes],
        "partly": [yes, absent],
        "not": [no, undecided],
        "undecided": [undecided, absent],
        "not run": [absent, absent],
    }
    assert all(table.verdict_of(lines) == word for word, lines in verdicts.items())
    assert table.verdict_of([small]) == table.verdict_of([yes, no]) == "partly"


MODES = ("", ":adaptive=support", ":adaptive=reapply")


def test_a_defense_that_did_not_meet_its_strongest_attacker_says_so(table):
    labels = {"model": "m", "dataset": "d", "seed": 0, "metric": "psnr", "value": 1.0}
    plain = [Row(**labels, defense="dgp", attack="ig:iterations=9")]
    assert (
        table.claims.describe_attackers(plain) == "ig: plain; **dgp did not meet adaptive=support, adaptive=reapply**"
    )
    both = [*plain, *(Row(**labels, defense="dgp", attack=f"ig:adaptive={mode}") for mode in ("support", "reapply"))]
    assert table.claims.describe_attackers(both) == "ig: plain, reapply, support"
    late = [replace(one, seed=seed) for seed in (1, 2) for one in both[: 4 - seed]]  # reapply on two seeds of three
    assert table.claims.describe_attackers([*both, *late]) == (
        "ig: plain, reapply, support; dgp met adaptive=reapply on some seeds only"
    )
    once = [*both, *(replace(one, seed=seed) for seed in (1, 2) for one in both[:2])]
    assert table.claims.describe_attackers(once).endswith("; **dgp did not meet adaptive=reapply**"), (
        "one seed of three"
    )
    weaker = [*both, *(replace(one, defense="dgp:k1=0.1:k2=0.7") for one in both[:2])]
    assert table.claims.describe_attackers(weaker).endswith("; **dgp did not meet adaptive=reapply**"), "one setting"
    active = [Row(**labels, defense="dgp", attack=attack) for attack in ("rob", "rob:adaptive=support")]
    assert table.claims.describe_attackers(active) == "rob: plain, support"  # it has no other mode
    natural = [
        Row(**(labels | {"dataset": "cifar10"}), defense="noise", attack=attack) for attack in ("ig", "ig-smooth")
    ]
    assert table.claims.describe_attackers(natural[:1]) == "ig: plain; ig-smooth was not asked"
    assert table.claims.describe_attackers(natural) == "ig, ig-smooth: plain"
    other = [replace(natural[0], **labels) for labels in ({"seed": 1}, {"model": "n"})]
    for lacking in other:
        assert table.claims.describe_attackers([*natural, lacking]).endswith("; ig-smooth was not asked of all")
    informed = [replace(row, defense="dgp", attack=f"{row.attack}{mode}") for mode in MODES for row in natural]
    assert table.claims.describe_attackers(informed) == "ig, ig-smooth: plain, reapply, support"
    members = [Row(**labels, defense="ppb", attack="samia", adaptive=False)]
    assert table.claims.describe_attackers(members) == "samia; **not met: rmia, lira, one who knows the defense**"


def test_a_claim_asks_for_the_attackers_of_the_defenses_that_it_compares(table):
    hides = table.claims.Finding("PriPrune's NMI is lower", "0.02", "supported", "fig8.private")
    again = replace(hides, measured="0.01", verdict="undecided", key="fig8.private.strongest")
    attacker = "sgi: plain; **pseudo-largest on prunefl did not meet magnitudes=true**"
    measured = table.claims.Measurement("priprune-fig8", ("qmnist",), [hides, again], "3 seeds", attacker, "full")
    study = table.claims.find("study", "priprune-fig8").make()
    assert study.list_compared("fig8.private") == ["priprune", "none"] and study.list_compared("rounds.lower") == []
    asked = {names: measured.ask_strongest(hides, "fig8.private.strongest", names) for names in ((), ("priprune",))}
    assert asked == {(): ("not asked", ""), ("priprune",): ("undecided", "0.01")}
    assert measured.ask_strongest(hides, "fig8.private.strongest", ["none", "pseudo-largest"])[0] == "not asked"


def test_a_claim_to_hide_is_answered_by_the_same_claim_of_the_strongest_attacker(table):
    hides = table.claims.Finding("DGP protects", "ig: 0.4", "supported", "recovery.dgp")
    other = table.claims.Finding("DGP hides from one who knows (not in the paper)", "0 of 1", "not supported", "x")
    item = {"study": "dgp-table1", "claims": {}, "own": ["cifar10"]}

    def answer(verdict, attacker="ig: plain, support"):
        again = replace(
            hides, claim=f"ours: {hides.claim}", measured="ig: 0.1", verdict=verdict, key="recovery.dgp.strongest"
        )
        findings = [hides, other, again] if verdict else [hides, other]
        measured = table.claims.Measurement("dgp-table1", ("cifar10",), findings, "20 updates", attacker, "full")
        (line,) = table.claims._claim_lines(item, "recovery.dgp", "", [measured], [])
        return line.against, line.stronger, table.claims._cells([line])[0][-1]

    weak = "reproduced, by the paper's attackers only"
    assert answer("supported") == ("holds", "ig: 0.1", "reproduced")
    assert answer("undecided") == ("undecided", "ig: 0.1", weak)
    assert answer("not supported") == ("does not hold", "ig: 0.1", weak)
    assert answer("") == ("not asked", "", weak)  # another claim about DGP is no answer
    unmet = "ig: plain; **dgp did not meet adaptive=support**"
    assert answer("supported", unmet) == ("not asked", "", weak)
    assert answer("not supported", unmet) == ("does not hold", "ig: 0.1", weak)


def test_a_claim_on_other_data_than_the_papers_is_on_a_stand_in(table):
    kept = table.claims.Finding("PriPrune preserves accuracy", "+1", "supported", "fig9.kept")
    for own, verdict in ((["qmnist"], "reproduced"), (["femnist"], "reproduced, on a stand-in")):
        item = {"study": "priprune-fig9", "claims": {}, "own": own}
        measured = table.claims.Measurement("priprune-fig9", ("qmnist",), [kept], "3 seeds", "", "full")
        (line,) = table.claims._claim_lines(item, "fig9.kept", "", [measured], [])
        assert table.claims._cells([line])[0][-1] == verdict
        assert table.verdict_of([line]) == ("reproduced" if line.full else "partly")


def test_a_claim_that_two_figures_make_by_the_same_rows_is_one(table):
    lines = [
        table.Line("Fig. 3", "DGP protects", ours="ig: 0.4", setting="3 seeds"),
        table.Line("Table 1", "DGP protects", ours="ig: 0.4", setting="3 seeds"),
        table.Line("Fig. 4", "DGP protects", ours="ig: 0.4", setting="1 seed"),
        table.Line("Fig. 5", "DGP protects"),
        table.Line("Fig. 6", "DGP protects"),
    ]
    assert [items for items, _ in table.group_claims(lines)] == ["Fig. 3; Table 1", "Fig. 4", "Fig. 5", "Fig. 6"]


def test_a_claim_to_hide_may_be_answered_by_attackers_of_another_study(table):
    def measure(study, data, attacker, *findings):
        found = [table.claims.Finding(claim, "1 of 1 yes", verdict, key) for claim, verdict, key in findings]
        return table.claims.Measurement(study, (data,), found, "5 seeds", attacker, "full")

    claim = ("ADV lowers the attack accuracy", "supported", "non_adaptive.adv")
    plain = measure("samia-fig17", "location", "samia; **not met: one who knows the defense**", claim)
    ours = "ADV lowers the AUC of the strongest (ours: the best)"
    informed = measure("samia-fig19", "location", "lira, samia", (ours, "supported", "strongest.lowers"))
    other = measure("samia-fig19", "cifar10", "lira, samia", (ours, "not supported", "strongest.lowers"))
    asks = {"non_adaptive.adv": "strongest.lowers"}
    item = {"study": "samia-fig17", "asks": asks, "own": ["location"]}
    (line,) = table.claims._claim_lines(item, "non_adaptive.adv", "", [plain], [other, informed])
    assert (line.against, line.attacker) == ("holds", "lira, samia (in samia-fig19)")
    smaller = replace(informed, reduced=True)
    (line,) = table.claims._claim_lines(item, "non_adaptive.adv", "", [plain], [smaller])
    assert (line.against, line.attacker) == ("holds", "lira, samia (in samia-fig19, reduced)")
    for key, answer in (("strongest.lowers", "holds"), ("strongest.other", "not asked")):  # the claim of ours that asks
        asking = item | {"asks": {"non_adaptive.adv": key}}
        (line,) = table.claims._claim_lines(asking, "non_adaptive.adv", "", [plain], [informed])
        assert line.against == answer
    (line,) = table.claims._claim_lines(item, "non_adaptive.adv", "", [plain], [other])  # other data answer nothing
    assert (line.against, line.attacker) == ("not asked", plain.attacker)


def test_tables_inside_pages_come_from_rows(table, folder):
    rows = [*audited("none", 0.0, 0.60), *audited("l1-unstructured", 0.5, 0.61)]
    write_archive(folder / "rows" / "some.jsonl.xz", rows, {"studies": ["samia-fig6"], "scale": "small"})
    page = folder / "samia.md"
    by_pruner = "<!-- rows some | pruner | test_accuracy sparsity=0.5 = half | dataset=location -->"
    by_study = "<!-- study some samia-fig6 | model; change from the original -->"
    page.write_text(f"# A\n{by_pruner}\n91.0%\n<!-- end -->\nB\n{by_study}\n<!-- end -->\n")
    assert table.main(["--check"]) == 1 and table.main([]) == 0
    text = page.read_text()
    assert (
        f"{by_pruner}\n| pruner | half |\n| --- | --- |\n| l1-unstructured | 61.1% [60.9, 61.3] |\n<!-- end -->" in text
    )
    assert "| l1-unstructured 0.5 | +1.0 points |" in text and "91.0%" not in text
    page.write_text(text.replace("61.1%", "62.1%"))
    assert table.main(["--check"]) == 1


def test_a_table_of_a_study_always_shows_its_marks(table, folder):
    pages = sys.modules["pages"]
    labels = {"model": "resnet18", "dataset": "cifar10", "seed": 0, "metric": "cw_ssim", "attack": "ig"}
    rows = [
        Row(**labels, defense=name, value=0.5, low=0.4, high=0.6, extra={"target": None}) for name in ("dgp", "none")
    ]
    for some, last in ((rows, "| dgp | 0.500 [0.400, 0.600] | met the plain attacker only |"), (rows[:1], "")):
        path = folder / "rows" / "some.jsonl.xz"
        write_archive(path, some, {"studies": ["dgp-table1"], "scale": "small"})
        text = pages.tabulate_study(pages.read_archive(path), "dgp-table1", "defense; cw_ssim")
        assert last in text and ("| mark |" in text) == (len(some) > 1)
        assert text.endswith("\n\nEvery line: met the plain attacker only.") == (len(some) == 1)


def test_a_table_that_mixes_rows_is_refused(table):
    rows = [*audited("l1-unstructured", 0.5, 0.6, (0,)), *audited("l1-unstructured", 0.7, 0.5, (0,))]
    with pytest.raises(ValueError, match="several rows of one seed"):
        sys.modules["pages"].tabulate_rows(rows, "pruner", "test_accuracy")


def test_a_measured_number_in_a_sentence_is_refused(table, folder, capsys):
    page = folder / "samia.md"
    rest = "Section 4.1 has it [at .6](README.md) and `tv=.1`. Fig. 3 is like 95 % of them.\n"
    page.write_text(f"# A of .5\n## Method\nSparsity .6, 3 % of rows.\n\n## B\n{rest}")
    assert table.main([]) == 0 and table.main(["--check"]) == 0
    for number in ("an AUC of .62", "by 12 dB", "3.4 points", "8 of 9 cases", "four times as much", "60 %"):
        page.write_text(f"# A\n## B\nIt has {number} here. {rest}")
        assert table.main(["--check"]) == 1
        assert f"samia.md: It has {number} here. (a number that no row gives" in capsys.readouterr().err


def test_numbers_of_a_benchmark_become_rows_and_a_table_with_its_source(table, folder):
    spec = importlib.util.spec_from_file_location("bench_archive", RESULTS.parent / "benchmarks" / "archive.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    case = {"model": "mlp", "clients": 10, "limit": "<= 1.05", "seconds": {"plain": 2.0, "fit": 1.5}, "note": "x"}
    rows = list(bench.make_rows(case))
    assert [(row.metric, row.value, row.timing) for row in rows] == [
        ("plain_seconds", 2.0, True),
        ("fit_seconds", 1.5, True),
    ]
    provenance = {"command": "python b.py", "commit": "abc1234", "machine": "a server", "load": "3.0"}
    write_archive(folder / "rows" / "bench.jsonl.xz", rows, provenance)
    marker = "<!-- rows bench | model, clients | fit_seconds = ours -->"
    (folder / "speed.md").write_text(f"{marker}\n<!-- end -->\n<!-- source bench -->\n<!-- end -->\n")
    text = table.make_pages()[folder / "speed.md"]
    assert "| mlp | 10 | 1.500 |" in text
    assert "`python b.py` at abc1234, a server, load 3.0 ([rows](rows/bench.jsonl.xz))." in text
