"""`secateur sweep` whose workers do not find its folder, as on another disk: `killable_sweep.py ARGUMENTS`."""

import sys
from dataclasses import replace

from secateur.cli import main
from secateur.sweep import run

at_home = run.at_home

if __name__ == "__main__":
    run.at_home = lambda out: replace(at_home(out), token="of another disk")
    sys.exit(main(["sweep", *sys.argv[1:]]))
