"""A federation in which things go wrong."""
