"""`secateur federate` that saves its state many times a second, to be killed: `killable_federate.py ARGUMENTS`."""

import sys

from secateur.cli import main
from secateur.federated import checkpoint

if __name__ == "__main__":
    checkpoint.EVERY = 0.1
    sys.exit(main(["federate", *sys.argv[1:]]))
