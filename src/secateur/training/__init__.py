"""Training of one model or of many, with early stopping."""
