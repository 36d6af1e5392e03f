"""What attacks found, held against the truth; the client under attack; limits."""
