"""Numbers printed in priprune, by the names used here; all other results of its evaluation are plots."""

from __future__ import annotations

# Table 2: NMI and its deviation over three runs by data set and base pruning, without and with PriPrune.
TABLE_2 = {
    ("femnist", "prunefl"): ((0.22, 0.008), (0.12, 0.007)),
    ("femnist", "feddst"): ((0.21, 0.025), (0.13, 0.007)),
    ("femnist", "synflow"): ((0.22, 0.009), (0.15, 0.005)),
    ("femnist", "snip"): ((0.23, 0.012), (0.13, 0.014)),
    ("cifar10", "prunefl"): ((0.29, 0.009), (0.24, 0.009)),
    ("cifar10", "feddst"): ((0.25, 0.008), (0.18, 0.006)),
    ("cifar10", "synflow"): ((0.25, 0.012), (0.21, 0.018)),
    ("cifar10", "snip"): ((0.24, 0.004), (0.22, 0.008)),
}
# From the text on Table 2: the share of NMI that PriPrune removes.
SAVED = {("femnist", "prunefl"): 0.455, ("cifar10", "feddst"): 0.28}

_TABLE_A1 = {
    1: (0.166, 0.171, 0.156, 0.138, 0.153, 0.154, 0.138, 0.159, 0.151),
    5: (0.154, 0.158, 0.136, 0.125, 0.121, 0.123, 0.135, 0.123, 0.130),
    10: (0.148, 0.142, 0.140, 0.132, 0.126, 0.118, 0.135, 0.132, 0.140),
}
_COLUMNS = [(privacy, sharing) for privacy in (1, 10, 15) for sharing in (2e-4, 2e-5, 2e-6)]
# Table A1: NMI of PruneFL with PriPrune on FEMNIST, by lambda_acc, lambda_pri and lambda_sha.
TABLE_A1 = {
    (accuracy, *column): value
    for accuracy, row in _TABLE_A1.items()
    for column, value in zip(_COLUMNS, row, strict=True)
}
