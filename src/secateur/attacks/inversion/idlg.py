"""iDLG: Improved Deep Leakage from Gradients."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.attacks.inversion.dlg import DLG
from secateur.attacks.inversion.labels import Rule
from secateur.catalogue import method


@method(
    "inversion",
    "idlg",
    "priprune",
    threat="an honest-but-curious server that knows the network, the batch size and how BatchNorm normalised; its rule "
    "for labels is exact for one example an update",
    active=False,
    demo={"iterations": 20},
)
@dataclass(frozen=True)
class IDLG(DLG):
    """iDLG (Zhao et al. 2020; in PriPrune, 2024): DLG with the label read from the last layer's gradient first."""

    labels: Rule = "idlg"
