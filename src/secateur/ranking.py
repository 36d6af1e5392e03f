"""Selection by rank on a GPU: of many tensors and many lanes in seven launches, and no number is read back.

Written in Triton, which torch's CUDA builds bring along: import this file only where there is a tensor on a GPU.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch._C._functorch import is_functorch_wrapped_tensor

from secateur.radix import BINS, COLUMNS, count, mark, ties

Ranks = tuple[tuple[int, ...], ...]
BITS = (7, 7, 9, 9)  # of the digits
EACH, TILE, PART, WARPS = 8192, 2048, 1024, 4  # entries of a program, of them at once in a histogram and elsewhere
VECTOR = 4  # entries that a thread reads at once where segments begin at a multiple


def bands(values: Tensor, lengths: tuple[int, ...], ranks: Tensor | Ranks, magnitudes: bool = False) -> Tensor:
    """(lanes, N) int8: how many of its segment's ranks an entry of (lanes, N) float32 lies below.

    `lengths` are the segments', N together; `ranks` say of each how many of its largest entries are meant, one number
    or two, rising: (segments, 1 or 2), or a tensor (lanes or 1, segments, 1 or 2) of numbers that only the device
    knows. Of equal entries the earlier counts as larger. So band 0 are the largest, band 1 those between two ranks.
    `magnitudes`: entries are ranked without their signs.
    """
    return _selected(values, _table(lengths, 1, values.device), ranks, magnitudes, False, 1)


def kept(values: Tensor, lengths: tuple[int, ...], ranks: Ranks, aligned: int, into: Tensor | None = None) -> Tensor:
    """(lanes, N): the entries whose magnitudes lie between their segment's two ranks, zeros in place of the others.

    Every segment begins at a multiple of `aligned` entries, which N is too; what lies between becomes 0. They go `into`
    memory that is given, the values' own if need be; under a transform it cannot be.
    """
    return _selected(values, _table(lengths, aligned, values.device), ranks, True, True, aligned, into)


def _selected(
    values: Tensor,
    table: Tensor,
    ranks: Tensor | Ranks,
    magnitudes: bool,
    kept: bool,
    aligned: int,
    into: Tensor | None = None,
) -> Tensor:
    """Tensors of a transform go to the operator, which has a rule for vmap; others save the way there."""
    if not isinstance(ranks, Tensor):
        ranks = _ranks(ranks, values.device)
    given = (values, table, ranks, magnitudes, kept, VECTOR if aligned % VECTOR == 0 else 1)
    if not (is_functorch_wrapped_tensor(values) or is_functorch_wrapped_tensor(ranks)):
        return _select(*given, into)
    found: Tensor = torch.ops.secateur.select(*given)
    return found


# Both are kept for good: a captured graph reads them whenever it is replayed.
@cache
def _table(lengths: tuple[int, ...], aligned: int, device: torch.device) -> Tensor:
    """(programs, 7) int64: what a program is to do.

    Its segment, where it starts, its entries, its entries with the gap behind them; and of its segment how many
    programs it has, its length, its first program.
    """
    rows: list[tuple[int, ...]] = []
    start = 0
    for segment, length in enumerate(lengths):
        slot, first = -(-length // aligned) * aligned, len(rows)
        begins = range(0, slot, EACH)
        rows += [
            (segment, start + at, min(EACH, length - at), min(EACH, slot - at), len(begins), length, first)
            for at in begins
        ]
        start += slot
    with _DisableFuncTorch():
        return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, COLUMNS.value)


@cache
def _ranks(ranks: Ranks, device: torch.device) -> Tensor:
    with _DisableFuncTorch():
        return torch.tensor(ranks, dtype=torch.int64, device=device)[None]


def _select(
    values: Tensor,
    table: Tensor,
    ranks: Tensor,
    magnitudes: bool,
    kept: bool,
    wide: int,
    into: Tensor | None = None,
) -> Tensor:
    """Seven launches, the first of which sets all counts to zero."""
    values, ranks = values.contiguous(), ranks.contiguous()
    (lanes, entries), (shared, segments, each) = values.shape, ranks.shape
    programs, places = len(table), lanes * segments
    result = torch.empty_like(values, dtype=values.dtype if kept else torch.int8) if into is None else into
    if not result.numel():
        return result
    counted = values.new_zeros(places * (2 * BINS.value + 1), dtype=torch.int32)
    found = values.new_empty(places, 6, dtype=torch.int32)
    equal = values.new_empty(2, lanes, programs, dtype=torch.int32)
    stride = segments * each if shared > 1 else 0
    how: dict[str, Any] = {"MAGNITUDES": magnitudes, "PART": PART, "num_warps": WARPS}
    grid, shift = (programs, lanes), 32
    with torch.cuda.device_of(values):
        for step, bits in enumerate(BITS):
            shift -= bits
            given = (values, table, ranks, counted, found, entries, segments, stride)
            # Entries that are added one by one lie in threads one by one: else all would change places first.
            count[grid](*given, shift, 1 << bits, step == 0, each, WIDE=wide if step < 2 else 1, TILE=TILE, **how)
        ties[grid](values, table, found, equal, entries, segments, WIDE=wide, **how)
        mark[grid](values, table, found, equal, result, entries, segments, kept, WIDE=wide, **how)
    return result


def _stacked(
    info: Any, dims: tuple[int | None, ...], values: Tensor, table: Tensor, ranks: Tensor, *how: bool | int
) -> tuple[Tensor, int]:
    """Under vmap the many are more lanes of one call."""
    many = [
        tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in ((values, dims[0]), (ranks, dims[2]))
    ]
    lanes = many[0].shape[1]
    rows = many[0].expand(info.batch_size, -1, -1).flatten(0, 1)
    if many[1].shape[:2] != (1, 1):
        many[1] = many[1].expand(info.batch_size, lanes, -1, -1)
    found: Tensor = torch.ops.secateur.select(rows, table, many[1].flatten(0, 1), *how)
    return found.unflatten(0, (info.batch_size, lanes)), 0


_library = torch.library.Library("secateur", "FRAGMENT")
_library.define("select(Tensor values, Tensor table, Tensor ranks, bool magnitudes, bool kept, int wide) -> Tensor")
_library.impl("select", _select, "CompositeExplicitAutograd")
torch.library.register_vmap("secateur::select", _stacked, lib=_library)
