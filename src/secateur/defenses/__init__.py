"""Ways to give away less, one file each; each is an argument at the place where it acts."""
