"""The page's section on federations, from rows made by hand."""

from secateur.report.federation import over_rounds, table
from secateur.report.federation_gallery import sheets
from secateur.report.federation_names import brief, name, titles
from secateur.report.federation_plane import planes, traffic
from secateur.report.federation_rates import by_rate
from secateur.report.terminal import print_federation
from secateur.rows import Row


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
    first, second = table(ROWS)
    assert (first.accuracy, first.up, first.down) == (0.4, 20.0, 30.0)
    assert first.up_client == (5.0, 10.0, 15.0) and first.down_client is None and first.lost == 3 and first.leak == 9.0
    assert second.name == "snip, priprune" and second.up is None


def test_the_terminal_tells_membership_where_it_was_attacked(capsys):
    print_federation(ROWS)
    assert "AUC" not in (said := capsys.readouterr().out) and "40.0%" in said and "9.0 dB" in said
    print_federation([*ROWS, row("auc", 0.61, 2, client=1, attack="yeom")])
    assert "AUC" in (said := capsys.readouterr().out) and "0.610" in said


def test_curves_are_means_over_seeds_and_what_never_changes_is_not_drawn():
    (view,) = over_rounds(ROWS)
    assert [panel.title for panel in view.panels] == [
        "test accuracy over rounds",
        "PSNR of reconstructions over rounds",
    ]
    accuracy, leak = view.panels
    assert list(accuracy.data[0]["x"]) == [1, 2] and list(accuracy.data[0]["y"]) == [0.2, 0.4]
    assert accuracy.data[0]["line"]["color"] == leak.data[0]["line"]["color"]
    assert "snip, ig" in leak.alt


def test_all_panels_go_on_to_the_last_round_and_a_lone_value_has_an_axis_of_its_size():
    (view,) = over_rounds([row("test_accuracy", 0.5, 1), row("test_accuracy", 0.7, 10), row("psnr", 9.0, 10, 3)])
    assert [panel.layout["xaxis"]["range"] for panel in view.panels] == [[0, 10.3]] * 2
    accuracy, leak = (panel.layout["yaxis"] for panel in view.panels)
    assert "range" not in accuracy and leak["range"] == [0, 1.2 * 9]


def attacked(base, defense, accuracy, nmi, rate=0.3, broadcast="masked", **more):
    """A federation with two attacked rounds."""
    extra = {"base_pruning": base, "averaging": "weighted", "broadcast": broadcast, "local_batch": 20, "client": None}
    own = {"model": "m", "dataset": "d", "defense": defense, "seed": 0, "sparsity": rate}
    rows = [Row(**own, metric="test_accuracy", value=accuracy, extra=extra | {"round": 2})]
    for metric, value in (("bytes_up", 3e6), ("bytes_down", 1e6)):
        rows += [Row(**own, metric=metric, value=value, extra=extra | {"round": 2, "client": c}) for c in (0, 1)]
    hit = extra | {"client": 1, "target": None, "attacked": 1} | more
    for number in (1, 2):
        told = own | {"attack": "sgi:iterations=9", "extra": hit | {"round": number}}
        rows += [Row(**told, metric="nmi_256", value=nmi), Row(**told, metric="psnr", value=20 * nmi)]
    return rows


FOUR = [
    *attacked("snip:rate=0.3", "none", 0.9, 0.4),
    *attacked("snip:rate=0.3", "priprune:sharing=2e-06", 0.88, 0.2),
    *attacked("feddst:every=5:rate=0.3", "none", 0.8, 0.3),
    *attacked("feddst:every=5:rate=0.3", "priprune", 0.85, 0.1),
]


def test_arrows_lead_from_a_base_pruning_alone_to_priprune():
    (view,) = planes(FOUR)
    nmi, psnr = view.panels
    assert view.label == "m on d, batches of 20" and nmi.title == "Accuracy against NMI, 256 levels"
    ends = [[arrow[name] for name in ("ax", "ay", "x", "y")] for arrow in nmi.layout["annotations"]]
    assert ends == [[0.9, 0.4, 0.88, 0.2], [0.8, 0.3, 0.85, 0.1]]
    colours = {trace["name"]: trace["marker"]["color"] for trace in nmi.data[:2]}
    assert [arrow["arrowcolor"] for arrow in nmi.layout["annotations"]] == [colours["snip"], colours["feddst"]]
    assert psnr.layout["annotations"][0]["y"] == 4.0
    assert view.text.startswith("snip: 90.0% right and NMI 0.400 alone, 88.0% right and NMI 0.200 with priprune")


def test_bytes_of_a_client():
    (view,) = traffic(FOUR)
    up, down = view.panels[0].data
    assert list(up["x"]) == [3.0] * 4 and list(down["x"]) == [1.0] * 4
    # No setting tells them apart, and a phone is narrow.
    assert list(up["y"]) == ["snip", "snip,<br>priprune", "feddst", "feddst,<br>priprune"]
    assert traffic([row for row in FOUR if row.extra["client"] is None]) == []


def test_names_keep_the_settings_that_differ():
    assert brief(["snip", "dgp:k1=0.1+error-feedback"]) == {x: x for x in ("snip", "dgp:k1=0.1+error-feedback")}
    rows = [{"base_pruning": "snip:every=2:rate=0.3", "defense": f"largest:of=all:rate={rate}"} for rate in (1, 2)]
    assert list(titles(rows).values()) == ["snip, largest:rate=1", "snip, largest:rate=2"]
    assert name({"base_pruning": "snip", "defense": "none", "broadcast": "dense"}) == "snip, broadcast dense"
    assert name({"base_pruning": "snip", "defense": "dp", "view": "sum"}) == "snip, only the sum seen, dp"


def test_leakage_by_pruning_rate():
    rows = [
        row for rate, nmi in ((0.3, 0.4), (0.9, 0.2)) for row in attacked(f"snip:rate={rate}", "none", 0.9, nmi, rate)
    ]
    rows += attacked("feddst", "none", 0.9, 0.3)
    rows += [
        Row(**(vars(row) | {"value": 9.0, "extra": row.extra | {"client": None, "attacked": 2}})) for row in rows[-4:]
    ]
    (view,) = by_rate(rows)
    snip, feddst = view.panels[0].data
    assert (snip["name"], list(snip["x"]), list(snip["y"])) == ("snip, masked, sgi", [0.3, 0.9], [0.4, 0.2])
    assert list(feddst["y"]) == [0.3]  # what gathers several clients counts nothing
    assert by_rate(FOUR) == []


def test_the_same_pictures_in_every_federation():
    common = {"kind": "picture", "model": "m", "dataset": "d", "seed": 0, "local_batch": 4, "batch_size": 4}
    figures = []
    for base in ("snip:rate=0.9", "snip:rate=0.3"):
        for item, psnr in ((0, 5.0), (1, 9.0)):
            own = common | {"base_pruning": base, "defense": "none", "round": 1, "client": 2, "item": item}
            figures.append(own | {"attack": None, "png": f"truth {item}"})
            figures.append(own | {"attack": "sgi:iterations=9", "png": f"{base} {item}", "scores": {"psnr": psnr}})
    (sheet,) = sheets(figures)
    assert sheet.title == "sgi: m on d, batches of 4"
    assert [name for name, _ in sheet.lines] == ["truth", "snip:rate=0.3", "snip:rate=0.9"]
    assert [picture.png for picture in sheet.lines[0][1]] == ["truth 1", "truth 0"]  # the nearest first
    assert [picture.png for picture in sheet.lines[1][1]] == ["snip:rate=0.3 1", "snip:rate=0.3 0"]
    assert sheets(figures[:4]) == []  # of one federation there is nothing to compare
