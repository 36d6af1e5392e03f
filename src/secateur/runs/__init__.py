"""A run's folder: stages, artifacts, rows, and what is unfinished."""
