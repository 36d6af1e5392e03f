"""Fast paths of a GPU: kernels, CUDA graphs, precision; each has a plain counterpart in torch."""
