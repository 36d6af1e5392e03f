"""A federation of handwritten digits."""
