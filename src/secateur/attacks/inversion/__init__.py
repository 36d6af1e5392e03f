"""Attacks that turn a client's update back into its training examples."""
