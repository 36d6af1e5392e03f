"""`secateur invert` that saves its state many times a second, to be killed. `python killable_invert.py ARGUMENTS`."""

import sys

from secateur import watching
from secateur.attacks.inversion import loop
from secateur.cli import main

if __name__ == "__main__":
    watching.EVERY = loop.SAVE_SECONDS = 0.2
    sys.exit(main(["invert", *sys.argv[1:]]))
