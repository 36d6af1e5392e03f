"""Pruning: masks from scores, filters and gates, and the real removal of channels."""
