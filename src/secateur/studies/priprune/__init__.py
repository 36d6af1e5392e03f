"""The figures and tables of "PriPrune: Quantifying and Preserving Privacy in Pruned Federated Learning"."""
