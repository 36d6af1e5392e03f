"""A Flower app with an agreed defense, and models that are whole, pruned or parts."""
