"""The page's section on federations, from rows made by hand."""

from secateur.report.federation import over_rounds, table
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
