"""The page's section on federations, from rows made by hand."""

import re
from dataclasses import replace

from secateur.report import federation
from secateur.report.federation import (
    draw_rounds,
    name_federation,
    shorten_methods,
    shorten_names,
    summarise_federations,
)
from secateur.report.federation_plots import build_federation_sheets, draw_planes, draw_rates, draw_traffic
from secateur.report.page import Source, render
from secateur.report.summary import SummaryCell
from secateur.report.terminal import print_federation
from secateur.runs.rows import Row


def row(metric, value, round, client=None, defense="none", seed=0, attack=None):
    extra = {"base_pruning": "snip", "averaging": "weighted", "broadcast": "masked", "round": round, "client": client}
    labels = {"model": "m", "dataset": "d", "defense": defense, "seed": seed, "attack": attack}
    return Row(**labels, metric=metric, value=value, extra=extra)


ROWS = [
    *(row("test_accuracy", value, r, seed=s) for s, r, value in ((0, 1, 0.1), (0, 2, 0.3), (1, 1, 0.3), (1, 2, 0.5))),
    *(row("density", 0.7, r) for r in (1, 2)),
    *(row("bytes_up", 10.0 * r, r) for r in (1, 2)),
    row("bytes_up", 5.0, 2, client=0),
    row("bytes_up", 15.0, 2, client=1),
    row("bytes_up", 0.0, 2, client=2),  # took no part
    row("bytes_down", 30.0, 2),
    row("lost_clients", 2, 1),
    row("lost_clients", 4, 2, seed=1),
    row("psnr", 7.0, 2, client=1, attack="ig"),
    row("psnr_max", 9.0, 2, client=1, attack="ig"),
    row("test_accuracy", 0.2, 2, defense="priprune"),
]


def test_a_line_a_federation():
    first, second = summarise_federations(ROWS)
    assert [first.value(x) for x in ("test_accuracy", "bytes_up", "bytes_down")] == [0.4, 20.0, 30.0]
    assert first.cells["client_bytes_up"] == SummaryCell(10.0, 5.0, 15.0) and "client_bytes_down" not in first.cells
    assert (first.value("lost_clients"), first.value("psnr_max")) == (3, 9.0)
    assert name_federation(second.labels) == "snip, priprune" and second.value("bytes_up") is None


def test_the_terminal_tells_membership_where_it_was_attacked(capsys):
    print_federation(ROWS)
    assert "AUC" not in (said := capsys.readouterr().out) and "40.0%" in said and "9.0 dB" in said
    print_federation([*ROWS, row("auc", 0.61, 2, client=1, attack="yeom")])
    assert "AUC" in (said := capsys.readouterr().out) and "0.610" in said


def test_a_narrow_terminal_cuts_up_no_setting(capsys):
    print_federation(attacked("prunefl:every=2:iterations=400:samples=2000", "priprune:privacy=10.0", 0.9, 0.4))
    said = capsys.readouterr().out
    assert all(whole in said for whole in ("iterations=400", "samples=2000", "privacy=10.0"))


def cells(rows):
    """The page's table of federations: its headings, and its lines of (what a column is sorted by, what it shows)."""
    alone = [replace(row, extra={k: v for k, v in row.extra.items() if k != "target"}) for row in rows]  # no other part
    page = render([Source("federate", alone, [], config="", environment={})])
    whole = page[page.index('id="federated"') :].partition("</table>")[0]
    headings = [re.sub("<.*?>", "", each) for each in re.findall("<th.*?</th>", whole)]
    lines = [re.findall(r'<td[^>]*?(?:data-value="(.*?)")?>(.*?)</td>', line) for line in whole.split("<tr>")[2:]]
    return headings, [dict(zip(headings, line, strict=True)) for line in lines]


def test_leakage_stands_beside_accuracy_and_numbers_are_sorted_as_numbers():
    headings, (first, second, *_) = cells(FOUR)
    assert headings[:6] == ["base pruning", "defense", "test accuracy", "NMI", "NMI by chance", "PSNR"]
    assert first["test accuracy"] == ("0.9", "90.0%") and first["MB up a client"][0] == "3000000.0"
    assert first["NMI by chance"] == ("0.3", "0.300") and "AUC of membership" not in headings
    _, (unattacked, *_) = cells([row for row in ROWS if row.metric == "test_accuracy"])
    assert unattacked["NMI"] == ("", "-")  # an empty one stays below
    assert second["defense"][1] == "priprune<small>sharing=2e-06</small>"


def test_who_was_lost_and_what_was_not_attacked_is_told():
    lost = [replace(row("lost_clients", 1, number), note="client 3 dropped out") for number in range(1, 33)]
    page = render([Source("federate", [*ROWS, *lost], [], config="", environment={})])
    assert "could not be made: 32" in page and "<li>and 2 more in results.jsonl</li>" in page
    assert "<li>snip, seed 0, round 1: client 3 dropped out</li>" in page
    missed = replace(row("attacked_clients", 0, 2, attack="sgi:iterations=9"), note="not attacked: nobody answered")
    assert federation.list_mishaps([missed]) == [
        "snip, seed 0, round 2: sgi:iterations=9: not attacked: nobody answered"
    ]
    assert "could not be made" not in render([Source("federate", ROWS, [], config="", environment={})])


def test_what_every_method_was_set_to_is_told_once():
    told = ["snip: rate=0.3; priprune: alpha=0.5, step=0.01", "snip: rate=0.3", ""]
    rows = [replace(row("density", 0.7, 1), extra=row("density", 0.7, 1).extra | {"settings": each}) for each in told]
    assert federation.list_settings(rows) == ["snip: rate=0.3", "priprune: alpha=0.5, step=0.01"]
    page = render([Source("federate", rows, [], config="", environment={})])
    assert "<li>priprune: alpha=0.5, step=0.01</li>" in page


def test_what_all_federations_share_is_a_sentence_and_what_differs_a_column():
    both = [*FOUR, *attacked("snip:rate=0.3", "none", 0.9, 0.4, view="sum")]
    found = summarise_federations(both)
    assert federation.list_varying(summarise_federations(FOUR)) == {} and federation.list_varying(found) == {
        "view": "server sees"
    }
    assert federation.describe_shared(found) == "network m, data d, batch 20, average weighted, broadcast masked"
    headings, lines = cells(both)
    assert headings[0] == "server sees" and [line["server sees"][1] for line in lines[-2:]] == [
        "every update",
        "only the sum",
    ]


def test_curves_are_means_over_seeds_and_what_never_changes_is_not_drawn():
    (view,) = draw_rounds(ROWS)
    assert [panel.title for panel in view.panels] == [
        "test accuracy over rounds",
        "PSNR of reconstructions over rounds",
    ]
    accuracy, leak = view.panels
    assert list(accuracy.data[0]["x"]) == [1, 2] and list(accuracy.data[0]["y"]) == [0.2, 0.4]
    assert accuracy.data[0]["line"]["color"] == leak.data[0]["line"]["color"]
    assert "snip, ig" in leak.alt


def test_leakage_is_not_spoken_of_where_nobody_attacked():
    page = render([Source("federate", [row for row in ROWS if row.attack is None], [], config="", environment={})])
    assert 'id="rounds"' in page and "leakage jumps" not in page


def test_nmi_stands_beside_what_chance_gives():
    (view,) = draw_rounds(FOUR)
    (nmi,) = (panel for panel in view.panels if panel.title.startswith("NMI"))
    *_, chance = nmi.data
    assert (chance["name"], list(chance["x"]), list(chance["y"])) == ("by chance", [1, 2], [0.3, 0.3])
    assert "by chance 0.3" in nmi.alt and "by chance" not in view.panels[0].alt


def test_of_many_curves_the_first_panel_names_the_colours_and_the_others_the_dashes():
    bases = [f"snip:rate={number / 20}" for number in range(11)]
    rows = [
        row for base in bases for attack in ("sgi", "ig") for row in attacked(base, "none", 0.9, 0.4, attack=attack)
    ]
    (view,) = draw_rounds(rows)
    accuracy, nmi = view.panels[:2]
    named = [[trace["name"] for trace in panel.data if trace.get("showlegend", True)] for panel in (accuracy, nmi)]
    assert named == [bases, ["sgi", "ig", "by chance"]]
    looks = {(trace["line"]["color"], trace["marker"]["symbol"]) for trace in accuracy.data}
    assert len(looks) == len(bases)  # there are ten colours


def test_all_panels_go_on_to_the_last_round_and_a_lone_value_has_an_axis_of_its_size():
    (view,) = draw_rounds([row("test_accuracy", 0.5, 1), row("test_accuracy", 0.7, 10), row("psnr", 9.0, 10, 3)])
    assert [panel.layout["xaxis"]["range"] for panel in view.panels] == [[0, 10.3]] * 2
    accuracy, leak = (panel.layout["yaxis"] for panel in view.panels)
    assert "range" not in accuracy and leak["range"] == [0, 1.2 * 9]


def attacked(base, defense, accuracy, nmi, rate=0.3, broadcast="masked", view="update", attack="sgi", **more):
    """A federation with two attacked rounds."""
    extra = {"base_pruning": base, "averaging": "weighted", "broadcast": broadcast, "local_batch": 20, "client": None}
    extra |= {"view": view}
    own = {"model": "m", "dataset": "d", "defense": defense, "seed": 0, "sparsity": rate}
    rows = [Row(**own, metric="test_accuracy", value=accuracy, extra=extra | {"round": 2})]
    for metric, value in (("bytes_up", 3e6), ("bytes_down", 1e6)):
        rows += [Row(**own, metric=metric, value=value, extra=extra | {"round": 2, "client": c}) for c in (0, 1)]
    hit = extra | {"client": 1, "target": None, "attacked": 1} | more
    for number in (1, 2):
        told = own | {"attack": f"{attack}:iterations=9", "extra": hit | {"round": number}}
        rows += [Row(**told, metric="nmi_256", value=nmi), Row(**told, metric="psnr", value=20 * nmi)]
        rows += [Row(**told, metric="nmi_256_chance", value=0.3)]
    return rows


FOUR = [
    *attacked("snip:rate=0.3", "none", 0.9, 0.4),
    *attacked("snip:rate=0.3", "priprune:sharing=2e-06", 0.88, 0.2),
    *attacked("feddst:every=5:rate=0.3", "none", 0.8, 0.3),
    *attacked("feddst:every=5:rate=0.3", "priprune", 0.85, 0.1),
]


def test_arrows_lead_from_a_base_pruning_alone_to_priprune():
    (view,) = draw_planes(summarise_federations(FOUR))
    nmi, psnr = view.panels
    assert view.label == "m on d, batches of 20" and nmi.title == "Accuracy against NMI, 256 levels"
    ends = [[arrow[name] for name in ("ax", "ay", "x", "y")] for arrow in nmi.layout["annotations"]]
    assert ends == [[0.9, 0.4, 0.88, 0.2], [0.8, 0.3, 0.85, 0.1]]
    colours = {trace["name"]: trace["marker"]["color"] for trace in nmi.data[:2]}
    assert [arrow["arrowcolor"] for arrow in nmi.layout["annotations"]] == [colours["snip"], colours["feddst"]]
    assert psnr.layout["annotations"][0]["y"] == 4.0
    told = "snip: 90.0% right and NMI 0.400 (0.300 by chance) alone, 88.0% right and NMI 0.200 (0.300 by chance)"
    assert view.text.startswith(f"{told} with priprune")


def test_no_two_federations_look_the_same_on_the_plane():
    defenses = ["none", "priprune:privacy=10.0", "priprune:privacy=10.0+dp", *(f"d{number}" for number in range(10))]
    rows = [row for number, each in enumerate(defenses) for row in attacked("snip", each, 0.1 + 0.01 * number, 0.4)]
    rows += attacked("snip", "none", 0.5, 0.4, view="sum") + attacked("snip", "none", 0.6, 0.4, broadcast="dense")
    rows += [row for rate in (0.3, 0.9) for row in attacked(f"synflow:rate={rate}", "none", rate, 0.4)]
    (view,) = draw_planes(summarise_federations(rows))
    points = [trace for trace in view.panels[0].data if trace["x"][0] is not None]
    looks = [
        (trace["name"], trace["marker"]["color"], *look)
        for trace in points
        for look in zip(trace["marker"]["symbol"], trace["text"], strict=True)
    ]
    assert len(set(looks)) == len(looks) == len(summarise_federations(rows))
    assert {name: [text for *_, text in looks if _[0] == name] for name in ("synflow", "snip, only the sum seen")} == {
        "synflow": ["rate=0.3", "rate=0.9"],
        "snip, only the sum seen": [""],
    }


def test_bytes_of_a_client():
    (view,) = draw_traffic(summarise_federations(FOUR))
    up, down = view.panels[0].data
    assert list(up["x"]) == [3.0] * 4 and list(down["x"]) == [1.0] * 4
    # No setting tells them apart, and a phone is narrow.
    assert list(up["y"]) == ["snip", "snip,<br>priprune", "feddst", "feddst,<br>priprune"]
    assert draw_traffic(summarise_federations([row for row in FOUR if row.extra["client"] is None])) == []


def test_names_keep_the_settings_that_differ():
    joined = ["dgp:k1=0.1+error-feedback", "largest:rate=0.3+dp:clip=1.0", "largest:rate=0.3+dp:clip=2.0"]
    assert list(shorten_methods(["snip", *joined]).values()) == [
        "snip",
        "dgp+error-feedback",
        "largest+dp:clip=1.0",
        "largest+dp:clip=2.0",
    ]
    rows = [{"base_pruning": "snip:every=2:rate=0.3", "defense": f"largest:of=all:rate={rate}"} for rate in (1, 2)]
    assert list(shorten_names(rows).values()) == ["snip, largest:rate=1", "snip, largest:rate=2"]
    assert name_federation({"base_pruning": "snip", "defense": "none", "broadcast": "dense"}) == "snip, broadcast dense"
    assert name_federation({"base_pruning": "snip", "defense": "dp", "view": "sum"}) == "snip, only the sum seen, dp"


def test_leakage_by_pruning_rate():
    rows = [
        row for rate, nmi in ((0.3, 0.4), (0.9, 0.2)) for row in attacked(f"snip:rate={rate}", "none", 0.9, nmi, rate)
    ]
    rows += attacked("feddst", "none", 0.9, 0.3)
    rows += [
        Row(**(vars(row) | {"value": 9.0, "extra": row.extra | {"client": None, "attacked": 2}})) for row in rows[-4:]
    ]
    (view,) = draw_rates(rows)
    snip, feddst = view.panels[0].data
    assert (snip["name"], list(snip["x"]), list(snip["y"])) == ("snip, masked, sgi", [0.3, 0.9], [0.4, 0.2])
    assert list(feddst["y"]) == [0.3]  # what gathers several clients counts nothing
    assert draw_rates(FOUR) == []


def test_the_same_pictures_in_every_federation():
    common = {"kind": "picture", "model": "m", "dataset": "d", "seed": 0, "local_batch": 4, "batch_size": 4}
    figures = []
    for base in ("snip:rate=0.9", "snip:rate=0.3"):
        for item, psnr in ((0, 5.0), (1, 9.0)):
            own = common | {"base_pruning": base, "defense": "none", "round": 1, "client": 2, "item": item}
            figures.append(own | {"attack": None, "png": f"truth {item}"})
            figures.append(own | {"attack": "sgi:iterations=9", "png": f"{base} {item}", "scores": {"psnr": psnr}})
    (sheet,) = build_federation_sheets(figures)
    assert sheet.title == "sgi: m on d, batches of 4"
    assert [name for name, _ in sheet.lines] == ["truth", "snip:rate=0.3", "snip:rate=0.9"]
    assert sheet.lines[0][1] == ["truth 1", "truth 0"]  # the nearest first
    assert sheet.lines[1][1] == ["snip:rate=0.3 1", "snip:rate=0.3 0"]
    assert build_federation_sheets(figures[:4]) == []  # of one federation there is nothing to compare
