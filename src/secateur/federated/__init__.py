"""Training by many users who keep their data: collaborative SGD under any upload (dgp Algorithm 2)."""
