"""Determinism: one seed gives the same weights, bit for bit, on the same machine with the same versions.

Four things differ between two runs on a GPU. Some operations add in the order in which threads finish. cuDNN times its
algorithms, and `auto` the ways of `training/execution.py`, and both take the fastest of the day. cuBLAS may share its
workspace between streams. All four are fixed inside `deterministic`. Kernels of this package need nothing: the only
atomic operations, in `select_kernels`, count whole numbers, whose sum has no order.

An operation of a network that has no deterministic form still runs, and torch warns of it. Max pooling has none, but
adds in an order only where its windows overlap. Flower's clients are other processes, which the mode does not reach.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Use deterministic algorithms inside, and restore all settings afterwards; do nothing if not `wanted`."""
    if not wanted:
        yield
        return
    os.environ.setdefault(*WORKSPACES)
    memory: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory, cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)  # an error would end a run after hours
    memory.fill_uninitialized_memory = cudnn.benchmark = False  # filling new memory only helps to find faults
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory, cudnn.benchmark = before[1:]


def is_deterministic() -> bool:
    """Return True inside `deterministic`."""
    return torch.are_deterministic_algorithms_enabled()


def device_key(device: torch.device) -> str:
    """Return the device as a stage's key names it: results of a GPU depend on the mode too."""
    return f"{device.type}, deterministic" if device.type == "cuda" and is_deterministic() else device.type
