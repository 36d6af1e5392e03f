"""The tiny federation of tests/federated is this one's too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "federated"))
