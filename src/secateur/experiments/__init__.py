"""The jobs of the command line: audit, prune, invert, federate."""
