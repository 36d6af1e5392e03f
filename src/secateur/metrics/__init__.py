"""Leakage, utility and cost, as pure functions."""
