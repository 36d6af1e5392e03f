"""Attacks on models and updates: membership inference and inversion."""
