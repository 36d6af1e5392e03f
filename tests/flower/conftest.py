"""The tiny federations of tests/federated are this one's too."""

import sys
from pathlib import Path

FEDERATED = Path(__file__).parents[1] / "federated"
sys.path += [str(FEDERATED), str(FEDERATED / "submodels")]
