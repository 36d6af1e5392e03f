"""The gradients of many features of a batch by its inputs, taken back through the network together."""
