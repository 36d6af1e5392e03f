"""Adam's constants, which PriPrune's kernels and its plain steps share."""

from __future__ import annotations

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # of Adam
