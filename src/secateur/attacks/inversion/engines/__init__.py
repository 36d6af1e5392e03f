"""Three ways to compare the gradients of many trials with what was observed; plain.py is the reference."""
