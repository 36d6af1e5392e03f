"""Was an example in the training data? One file an attack."""
