"""Layers of many networks at once, each with weights of its own: by kernels on a GPU, and by torch's operations."""
