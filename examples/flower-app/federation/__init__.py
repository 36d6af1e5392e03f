"""A federation of secateur's as a Flower app."""
