"""Networks, one file a family: plain functions that return an nn.Module."""
