"""Fast paths of a GPU: kernels, CUDA graphs, precision; each has a plain counterpart in torch."""

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # of Adam, which PriPrune's kernels and its plain steps share
