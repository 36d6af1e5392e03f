"""CPU seconds of a search of recipes beside separate audits of the same recipes, measured in one run.

A search trains the originals once, and attacks only its finalists with shadow models. A separate audit trains a victim
and its shadow models for one recipe. Some recipes of the search are audited alone, and their mean stands for all.
Printed: the number of audits that take as long as the search (goal: 20 recipes in the time of 6 audits), and the wall
seconds by kind of work. CPU seconds of one thread are compared, as other programs may use the machine.

    python benchmarks/recommend.py [--data location] [--model mlp] [--recipes 20] [--audits 2] [--shadows 5] [--seed 0]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from secateur.config import Audit, Recommend, read
from secateur.experiments.audit import run_audit
from secateur.experiments.recommend import run_recommend
from secateur.runs.rows import Row


def audit_alone(row: Row, fields: dict[str, Any], attacks: list[str], folder: Path) -> float:
    """Return the seconds of an audit of one recipe, by an attacker that knows it."""
    recipe = {"pruner": row.pruner, "sparsity": row.sparsity, "defense": row.defense, "attack": attacks}
    schedule = {"finetune": {"epochs": row.extra["epochs"], "learning_rate": row.extra["learning_rate"]}}
    config = read(Audit, None, fields | recipe | schedule | {"adaptive": True, "seeds": 1})
    start = time.process_time()
    run_audit(config, folder)
    return time.process_time() - start


def main() -> None:
    """Search, audit some recipes alone, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="location")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--recipes", type=int, default=20)
    parser.add_argument("--audits", type=int, default=2)
    parser.add_argument("--shadows", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fields = {"model": options.model, "data": options.data, "shadows": options.shadows}
    config = read(Recommend, None, fields | {"candidates": options.recipes, "seed": options.seed})
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        result = run_recommend(config, Path(folder) / "search")
        whole = time.process_time() - start
        recipes = [row for row in result.rows if row.metric == "search_auc"][: options.audits]
        attacks = [str(attack) for attack in config.attack]
        alone = [audit_alone(row, fields, attacks, Path(folder) / str(i)) for i, row in enumerate(recipes)]
    mean = sum(alone) / len(alone)
    print(
        f"search of {options.recipes} recipes with its last audit: {whole:.1f} s, one audit: {mean:.1f} s (processor)"
    )
    print(f"as long as {whole / mean:.1f} separate audits")
    for row in result.rows:
        if row.metric == "seconds_spent":
            print(f"  {row.extra['work']}: {row.value:.1f} s in {row.extra['stages']} stages")


if __name__ == "__main__":
    main()
