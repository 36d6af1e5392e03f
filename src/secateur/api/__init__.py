"""The same from Python, on any nn.Module and tensors."""
