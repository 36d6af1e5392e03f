"""Evaluation of attacks against the truth; the client under attack; limits."""
