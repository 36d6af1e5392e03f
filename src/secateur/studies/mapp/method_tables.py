"""Tables of mapp_fl that compare methods: by channel rule, by client, and by the number of large clients.

Each table comes with the paper's claims, judged against intervals (Tables 2, 4, 5 and 6, Figs. 3 and 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import sub

from secateur.metrics.estimates import Measure, combine, mean
from secateur.studies.claims import Finding, judge
from secateur.studies.mapp.paper_numbers import (
    SIZES,
    TABLE_2,
    TABLE_2_LOCAL,
    TABLE_2_MAPP,
    TABLE_2_SERVER,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    Printed,
)
from secateur.studies.mapp.results import (
    LITTLE,
    NEAR,
    YEOM,
    Cases,
    MappFederation,
    MappResults,
    Tabulated,
    accurate,
    averaged,
    exposed,
    less,
    served,
    server_exposed,
    small_accurate,
    summary,
    whose,
)
from secateur.studies.table import Cells, TableLine

INDEPENDENT = ":coupling=independent"


def methods(results: MappResults) -> Tabulated:
    """Return Table 5 and Fig. 4: every channel rule with two large clients."""
    lines = [
        TableLine(
            {"rule": federation.title, "network": federation.model},
            summary(results, federation),
            str(TABLE_5.get((federation.submodels, federation.model), "")),
            whose(federation),
        )
        for federation in results.federations
    ]
    return lines, method_claims(results)


def method_claims(results: MappResults) -> list[Finding]:
    """Judge the paper's claims about its rules at two large clients."""
    rules = {
        f.submodels: f for f in results.federations if f.defense == "none" and f.submodels not in ("none", "local")
    }
    small, large = averaged(results)
    local = next((f for f in results.federations if f.submodels == "local"), None)
    mapp, hetero, dropout = (rules.get(name) for name in ("mapp-fl", "heterofl", "fdropout"))
    resampled = (("osr", "heterofl-r"), ("gsr", "mapp-fl-r"), ("fdropout", "ufr"))
    findings = [
        judge(
            "MaPP-FL's clients are less exposed than HeteroFL's",
            {"average client": less(results, hetero, mapp, exposed)},
        ),
        judge(
            f"MaPP-FL's clients are about as accurate as HeteroFL's (at most {100 * NEAR:g} points less)",
            {"average client": less(results, mapp, hetero, accurate)},
            bound=-NEAR,
        ),
        judge(
            f"MaPP-FL's clients are about as private as FDropout's (at most {100 * LITTLE:g} point more exposed)",
            {"average client": less(results, dropout, mapp, exposed)},
            bound=-LITTLE,
        ),
        judge(
            "FDropout's clients are less accurate than MaPP-FL's",
            {"average client": less(results, mapp, dropout, accurate)},
        ),
        judge(
            "fixed channel sets make more accurate clients than resampled ones",
            {
                f"{fixed} over {new}": less(results, rules.get(fixed), rules.get(new), accurate)
                for new, fixed in resampled
            },
            "every",
        ),
        judge(
            f"every rule's server is about as accurate as FedAvg with the large model (at most {100 * NEAR:g} less)",
            {name: less(results, rule, large, served) for name, rule in rules.items()},
            bound=-NEAR,
        ),
        judge(
            "FedAvg with the small model exposes clients less", {"average client": less(results, large, small, exposed)}
        ),
        judge("FedAvg with the small model costs the server accuracy", {"server": less(results, large, small, served)}),
        judge(
            "MaPP-FL's small clients are more accurate than alone",
            {"average client": less(results, mapp, local, small_accurate)},
        ),
    ]
    return [finding for finding in findings if finding.measured != "not measured here"]


def methods_and_clients(results: MappResults) -> Tabulated:
    """Return Table 5 as `methods` does, and Table 2 of the rules that it shows."""
    shown = ("none", "local", "mapp-fl")
    lines, findings = methods(results)
    more, others = by_client(MappResults([row for row in results.rows if row.extra.get("submodels") in shown]))
    clients = [replace(line, part="Client by client (Table 2)") for line in more if "client" in line.labels]
    return [*lines, *clients], [*findings, *others]


def by_client(results: MappResults) -> Tabulated:
    """Return Table 2: client by client, two of them large."""
    lines = []
    sizes = results.sizes(results.federations[0])
    first = sizes[min(sizes)]
    for client in sorted(first):
        cells: Cells = {}
        for federation in results.federations:
            name = f"{federation.title} ({federation.unit})"
            cells[f"{name} accuracy"] = mean(results.client(federation, client, "test_accuracy"))
            cells[f"{name} advantage"] = mean(results.client(federation, client, "advantage", YEOM))
        labels = {"client": str(client), "data size": str(first[client])}
        lines.append(TableLine(labels, cells, _table2(first[client], client)))
    lines += [
        TableLine(
            {"rule": federation.title, "network": federation.model},
            summary(results, federation),
            _server2(federation),
            whose(federation),
            part="Server and average client",
        )
        for federation in results.federations
    ]
    mapp = next((f for f in results.federations if f.submodels == "mapp-fl"), None)
    local = next((f for f in results.federations if f.submodels == "local"), None)
    small, large = averaged(results)
    gains: Cases = {}
    if mapp is not None and local is not None:
        alone = results.clients(local, "test_accuracy", small=True)
        for client in sorted(next(iter(alone.values()), {})):
            pair = [results.client(federation, client, "test_accuracy") for federation in (mapp, local)]
            gains[f"client {client}"] = combine(sub, *pair)
    return lines, [
        judge("every small client does better with MaPP-FL than alone", gains, "every"),
        judge(
            "small clients gain 13.5 points over training alone (at least 10 here)",
            {"average": less(results, mapp, local, small_accurate)},
            bound=0.10,
        ),
        judge(
            "FedAvg's server is exposed most with the large model",
            {"server": less(results, large, small, server_exposed)},
        ),
        judge(
            "MaPP-FL exposes the server less than FedAvg does", {"server": less(results, large, mapp, server_exposed)}
        ),
        judge(
            "MaPP-FL's server is more accurate than FedAvg's with the small model",
            {"server": less(results, mapp, small, served)},
        ),
    ]


def _table2(size: int, client: int) -> str:
    """Return the paper's numbers of the client, if its size is that of Table 2's federation."""
    if client >= len(SIZES) or SIZES[client] != size:
        return ""
    parts = [
        f"{name} {accuracy:.2f} / {advantages[client]:.2f}"
        for name, (accuracy, advantages) in zip(("large", "small"), TABLE_2.values(), strict=True)
    ]
    alone = TABLE_2_LOCAL[client]
    parts += [] if alone is None else [f"local {alone:.2f}"]
    return ", ".join([*parts, f"MaPP-FL {TABLE_2_MAPP[0][client]:.2f} / {TABLE_2_MAPP[1][client]:.2f}"])


def _server2(federation: MappFederation) -> str:
    """Return the paper's numbers of the server in Table 2."""
    pair = TABLE_2_SERVER.get((federation.submodels, federation.model))
    return "" if pair is None else str(Printed(*pair, None, None))


def by_large(results: MappResults) -> Tabulated:
    """Return Table 4 and Fig. 3: FDropout, HeteroFL and MaPP-FL by the number of large clients.

    The paper's numbers and claims are those of zeroed cells; federations that keep them have lines of their own.
    """
    lines = [
        TableLine(
            {"large clients": str(federation.large), "rule": federation.title},
            summary(results, federation),
            str(TABLE_4.get((_data(results), federation.large, federation.submodels), ""))
            if federation.uncovered == "zero"
            else "",
        )
        for federation in sorted(results.federations, key=lambda federation: federation.large)
    ]
    zeroed = [federation for federation in results.federations if federation.uncovered == "zero"]
    mapp = {federation.large: federation for federation in zeroed if federation.submodels == "mapp-fl"}

    def over(name: str, measure: Callable[[MappResults, MappFederation], Measure]) -> Cases:
        """Return MaPP-FL's measure less another rule's."""
        return {
            f"{large} large": less(results, federation, results.other(federation, submodels=name), measure)
            for large, federation in mapp.items()
        }

    def under(name: str, measure: Callable[[MappResults, MappFederation], Measure]) -> Cases:
        """Return another rule's measure less MaPP-FL's."""
        return {
            f"{large} large": less(results, results.other(federation, submodels=name), federation, measure)
            for large, federation in mapp.items()
        }

    all_small = mapp.get(0)
    hetero = None if all_small is None else results.other(all_small, submodels="heterofl")
    return lines, [
        judge("MaPP-FL's clients are less exposed than HeteroFL's", under("heterofl", exposed)),
        judge("MaPP-FL's clients are more accurate than FDropout's", over("fdropout", accurate)),
        judge(
            f"MaPP-FL's clients are about as private as FDropout's (at most {100 * LITTLE:g} point more exposed)",
            under("fdropout", exposed),
            bound=-LITTLE,
        ),
        judge(
            f"MaPP-FL's clients are about as accurate as HeteroFL's (at most {100 * NEAR:g} points less)",
            over("heterofl", accurate),
            bound=-NEAR,
        ),
        judge(
            "without large clients MaPP-FL's server is worse than its clients",
            {
                "average client": None
                if all_small is None
                else combine(sub, accurate(results, all_small), served(results, all_small))
            },
        ),
        judge(
            f"without large clients HeteroFL's server is as good as its clients (at most {100 * NEAR:g} points less)",
            {
                "average client": None
                if hetero is None
                else combine(sub, served(results, hetero), accurate(results, hetero))
            },
            bound=-NEAR,
        ),
    ]


def _data(results: MappResults) -> str:
    return next((row.dataset for row in results.rows), "")


def coupled(results: MappResults) -> Tabulated:
    """Return Table 6: channels drawn layer by layer, or inputs and outputs independently."""
    lines, cases = [], {}
    for federation in results.federations:
        rule, apart = federation.submodels.removesuffix(INDEPENDENT), federation.submodels.endswith(INDEPENDENT)
        labels = {"rule": rule, "inputs and outputs": "independent" if apart else "layer by layer"}
        lines.append(TableLine(labels, summary(results, federation), str(TABLE_6.get((rule, apart), ""))))
        if apart:
            cases[rule] = less(results, results.other(federation, submodels=rule), federation, accurate)
    return lines, [judge("clients are more accurate where channels are coupled layer by layer", cases, "every")]
