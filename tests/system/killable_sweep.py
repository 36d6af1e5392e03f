"""`secateur sweep` whose workers do not find its folder, as on another disk: `killable_sweep.py ARGUMENTS`."""

import sys
from dataclasses import replace

from secateur.cli import main
from secateur.sweep import run

create_folder = run.create_folder

if __name__ == "__main__":
    run.create_folder = lambda out: replace(create_folder(out), token="of another disk")
    sys.exit(main(["sweep", *sys.argv[1:]]))
