"""A convolution's windows as rows of a matrix, for pictures that are channels_last, and back."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Windows:
    """What a convolution sees at each place of its output: rows of (kernel height, width, channels of a group)."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.conv = conv
        reach = [(size - 1) * step for size, step in zip(conv.kernel_size, conv.dilation, strict=True)]
        if conv.padding == "same":
            before = [(total // 2, total - total // 2) for total in reach]
        else:
            before = [(0, 0)] * 2 if isinstance(conv.padding, str) else [(size, size) for size in conv.padding]
        plain = conv.padding_mode == "zeros" and all(one == other for one, other in before)
        self.padding = [one for one, _ in before] if plain else [0, 0]  # what the convolution itself puts on
        self._outside = None if plain else [*before[1], *before[0]]

    def padded(self, x: Tensor) -> Tensor:
        """With the padding that is put on outside of the convolution."""
        if self._outside is None:
            return x
        mode = self.conv.padding_mode
        return F.pad(x, self._outside, "constant" if mode == "zeros" else mode)

    def copied(self, a: Tensor, d: Tensor) -> int:
        """How many entries the rows would have."""
        height, width = self.conv.kernel_size
        return d[:, 0].numel() * a.shape[1] * height * width

    def rows(self, a: Tensor, trials: int) -> Tensor:
        """(trials * groups, places, ...) of (trials * B, channels, height, width)."""
        tall, wide = self.padding
        x = F.pad(a.movedim(1, -1), (0, 0, wide, wide, tall, tall)) if tall or wide else a.movedim(1, -1)
        for axis, (size, step, apart) in enumerate(self._sides(), start=1):
            x = x.unfold(axis, (size - 1) * apart + 1, step)[..., ::apart]
        # (N * B, places down, places across, channels, kernel height, kernel width)
        x = x.permute(0, 1, 2, 4, 5, 3)
        if self.conv.groups == 1:
            return x.reshape(trials, -1, x.shape[3:].numel())
        x = x.reshape(trials, -1, *x.shape[1:5], self.conv.groups, x.shape[5] // self.conv.groups)
        x = x.permute(0, 6, 1, 2, 3, 4, 5, 7)
        return x.reshape(trials * self.conv.groups, -1, x.shape[5:].numel())

    def unrows(self, rows: Tensor, a: Tensor, d: Tensor) -> Tensor:
        """The adjoint of `rows`: each entry goes back to where it was copied from, and what meets there is added."""
        places, kernel, groups = d.shape[2:], self.conv.kernel_size, self.conv.groups
        if groups > 1:
            parts = rows.reshape(-1, groups, a.shape[0] * groups // len(rows), *places, *kernel, a.shape[1] // groups)
            rows = parts.permute(0, 2, 3, 4, 5, 6, 1, 7)
        rows = rows.reshape(a.shape[0], *places, *kernel, a.shape[1])
        tall, wide = self.padding
        whole = rows.new_zeros(a.shape[0], a.shape[2] + 2 * tall, a.shape[3] + 2 * wide, a.shape[1])
        (high, step, apart), (broad, step_across, apart_across) = self._sides()
        for i in range(high):
            down = slice(i * apart, i * apart + (places[0] - 1) * step + 1, step)
            for j in range(broad):
                start = j * apart_across
                across = slice(start, start + (places[1] - 1) * step_across + 1, step_across)
                whole[:, down, across] += rows[:, :, :, i, j]
        return whole[:, tall : tall + a.shape[2], wide : wide + a.shape[3]].movedim(-1, 1)

    def grouped(self, rows: Tensor) -> Tensor:
        """(N, places, out) -> (N * groups, places, out / groups)."""
        trials, places, width = rows.shape
        groups = self.conv.groups
        return rows.view(trials, places, groups, width // groups).transpose(1, 2).flatten(0, 1)

    def ungrouped(self, rows: Tensor) -> Tensor:
        """The inverse of `grouped`."""
        return rows.view(-1, self.conv.groups, *rows.shape[1:]).transpose(1, 2).flatten(2)

    def _sides(self) -> list[tuple[int, int, int]]:
        """Kernel size, stride and dilation, down and across."""
        conv = self.conv
        return list(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True))
