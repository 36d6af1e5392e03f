"""How long the command line takes to answer, and what importing costs beyond torch.

CPU seconds, medians of fresh processes. Run it with: python benchmarks/startup.py [--archive FILE]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from statistics import median

import archive


def seconds(*command: str, repeats: int = 7) -> float:
    """The median CPU time of a fresh process, which other work on the machine does not change much."""
    print(f"measuring {repeats} processes of: {' '.join(command)} ...", file=sys.stderr, flush=True)
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    archive.add_option(parser)
    options = parser.parse_args()
    answer = seconds("-m", "secateur", "--help")
    print(f"secateur --help: {answer:.2f} s (target < 1: {'met' if answer < 1 else 'missed'})", flush=True)
    torch = seconds("-c", "import torch")
    beyond = seconds("-c", "import torch, secateur") - torch
    verdict = "met" if beyond < 0.3 else "missed"
    print(f"import secateur beyond torch: {beyond:.2f} s (target < 0.3: {verdict})", flush=True)
    whole = seconds("-c", "import torch, secateur; secateur.audit")
    print(f"import of all that secateur.audit needs beyond torch: {whole - torch:.2f} s", flush=True)
    numbers = {"secateur --help": (answer, "1"), "import secateur, beyond torch": (beyond, "0.3")}
    numbers["secateur.audit, beyond torch"] = whole - torch, ""
    archive.write(
        options.archive,
        [{"case": case, "limit": limit, "cpu_seconds": number} for case, (number, limit) in numbers.items()],
    )


if __name__ == "__main__":
    main()
