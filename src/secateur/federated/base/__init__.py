"""Base prunings of a federation (priprune Table 1): what its server, and in some its clients, remove to save bytes."""
