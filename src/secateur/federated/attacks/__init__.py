"""Attackers inside a federation."""
