"""The papers' theorems as numbers."""
