"""What mapp_fl says of its channel rules at two large clients, held against intervals (Table 5, Figs. 3 and 4)."""

from __future__ import annotations

from secateur.studies.claims import Finding, judge
from secateur.studies.mapp_compared import (
    LITTLE,
    NEAR,
    accurate,
    averaged,
    exposed,
    less,
    served,
    small_accurate,
)
from secateur.studies.mapp_found import Seen


def method_claims(found: Seen) -> list[Finding]:
    """What the paper says of its rules at two large clients."""
    rules = {f.submodels: f for f in found.federations if f.defense == "none" and f.submodels not in ("none", "local")}
    small, large = averaged(found)
    local = next((f for f in found.federations if f.submodels == "local"), None)
    mapp, hetero, dropout = (rules.get(name) for name in ("mapp-fl", "heterofl", "fdropout"))
    resampled = (("osr", "heterofl-r"), ("gsr", "mapp-fl-r"), ("fdropout", "ufr"))
    findings = [
        judge(
            "MaPP-FL's clients are less exposed than HeteroFL's",
            {"average client": less(found, hetero, mapp, exposed)},
        ),
        judge(
            f"MaPP-FL's clients are about as accurate as HeteroFL's (at most {100 * NEAR:g} points less)",
            {"average client": less(found, mapp, hetero, accurate)},
            bound=-NEAR,
        ),
        judge(
            f"MaPP-FL's clients are about as private as FDropout's (at most {100 * LITTLE:g} point more exposed)",
            {"average client": less(found, dropout, mapp, exposed)},
            bound=-LITTLE,
        ),
        judge(
            "FDropout's clients are less accurate than MaPP-FL's",
            {"average client": less(found, mapp, dropout, accurate)},
        ),
        judge(
            "fixed channel sets make more accurate clients than resampled ones",
            {
                f"{fixed} over {new}": less(found, rules.get(fixed), rules.get(new), accurate)
                for new, fixed in resampled
            },
            "every",
        ),
        judge(
            f"every rule's server is about as accurate as FedAvg with the large model (at most {100 * NEAR:g} less)",
            {name: less(found, rule, large, served) for name, rule in rules.items()},
            bound=-NEAR,
        ),
        judge(
            "FedAvg with the small model exposes clients less", {"average client": less(found, large, small, exposed)}
        ),
        judge("FedAvg with the small model costs the server accuracy", {"server": less(found, large, small, served)}),
        judge(
            "MaPP-FL's small clients are more accurate than alone",
            {"average client": less(found, mapp, local, small_accurate)},
        ),
    ]
    return [finding for finding in findings if finding.measured != "not measured here"]
