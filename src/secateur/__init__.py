"""Secateur measures what a compressed neural network gives away about its training data."""
