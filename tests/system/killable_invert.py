"""`secateur invert` that saves its state many times a second, to be killed. `python killable_invert.py ARGUMENTS`."""

import sys

from secateur.attacks.inversion import optimisation
from secateur.cli import main
from secateur.runs import unfinished

if __name__ == "__main__":
    unfinished.EVERY = optimisation.SAVE_SECONDS = 0.2
    sys.exit(main(["invert", *sys.argv[1:]]))
