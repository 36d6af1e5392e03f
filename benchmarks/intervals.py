"""Coverage of the interval of a TPR at a small FPR, simulated: under chance and under leaks.

Target: at least 93 % of the intervals hold the true TPR, and at most 3.5 % lie above it (a false alarm under chance).
Members and non-members are drawn from known distributions, so that the true TPR is known.

    python benchmarks/intervals.py [--draws 2000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scipy.stats import norm
from torch import Generator, Tensor

from secateur.metrics.membership import FPRS, roc, tpr_interval

SIZES = ((100, 100), (300, 300), (1000, 1000), (5000, 5000), (1000, 200), (200, 1000))  # members, non-members
LEAST, FALSE_ALARMS = 0.93, 0.035
Row = dict[str, Any]


def normal(shift: float) -> tuple[Callable[[int, Generator], Tensor], Callable[[float], float]]:
    """Return a draw of members' scores, shifted against the others' normal ones, and the true TPR at an FPR."""
    return (
        lambda size, rng: shift + torch.randn(size, generator=rng, dtype=torch.float64),
        lambda fpr: float(norm.sf(norm.isf(fpr) - shift)),
    )


def memorised(part: float) -> tuple[Callable[[int, Generator], Tensor], Callable[[float], float]]:
    """Return the same where a part of the members lies far above all others, and the rest is like them."""

    def draw(size: int, rng: Generator) -> Tensor:
        scores = torch.randn(size, generator=rng, dtype=torch.float64)
        return torch.where(torch.rand(size, generator=rng) < part, scores + 100, scores)

    return draw, lambda fpr: part + (1 - part) * fpr


CASES = {"chance": normal(0.0), "a leak": normal(1.0), "a tenth memorised": memorised(0.1)}


def simulate(case: str, members: int, nonmembers: int, draws: int, seed: int = 0) -> list[Row]:
    """Return for every FPR that the sample supports how often the interval holds the truth, or lies beside it."""
    draw, truth = CASES[case]
    rng = torch.Generator().manual_seed(seed)
    fprs = [fpr for fpr in FPRS if fpr * nonmembers >= 1]
    above, below = dict.fromkeys(fprs, 0), dict.fromkeys(fprs, 0)
    is_member = torch.arange(members + nonmembers) < members
    for _ in range(draws):
        outside = torch.randn(nonmembers, generator=rng, dtype=torch.float64)
        curve = roc(torch.cat([draw(members, rng), outside]), is_member)
        for fpr in fprs:
            estimate = tpr_interval(curve, members, nonmembers, fpr)
            above[fpr] += estimate.low > truth(fpr)
            below[fpr] += estimate.high < truth(fpr)
    rows = []
    for fpr in fprs:
        row = {"case": case, "members": members, "nonmembers": nonmembers, "fpr": fpr}
        row |= {"coverage": 1 - (above[fpr] + below[fpr]) / draws, "above": above[fpr] / draws}
        rows.append(row | {"met": row["coverage"] >= LEAST and row["above"] <= FALSE_ALARMS})
    return rows


def seconds(rows: int = 1_000_000) -> float:
    """Return the time of the intervals at all FPRs, with the curve, for so many rows."""
    rng = torch.Generator().manual_seed(0)
    scores, is_member = torch.rand(rows, generator=rng, dtype=torch.float64), torch.arange(rows) < rows // 2
    start = time.perf_counter()
    curve = roc(scores, is_member)
    for fpr in FPRS:
        tpr_interval(curve, rows // 2, rows - rows // 2, fpr)
    return time.perf_counter() - start


def main() -> None:
    """Simulate, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in CASES:
        for members, nonmembers in SIZES:
            for row in simulate(case, members, nonmembers, options.draws):
                rows.append(row)
                verdict = "met" if row["met"] else "missed"
                where = f"{case}, {members} members, {nonmembers} others, FPR {row['fpr']:g}"
                print(f"{where}: coverage {row['coverage']:.3f}, above {row['above']:.4f}: {verdict}", flush=True)
    print(f"1,000,000 rows take {seconds():.2f} s")
    if options.json:
        options.json.write_text(json.dumps({"draws": options.draws, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
