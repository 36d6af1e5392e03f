"""Numbers printed in mapp_fl, by the names used here; accuracies and advantages are in per cent."""

from __future__ import annotations

from typing import NamedTuple

PARAMETERS = {"mapp-cnn-8": "30k", "mapp-cnn-16": "100k", "mapp-cnn-32": "400k", "mapp-cnn-64": "1.6M"}


class Printed(NamedTuple):
    """Accuracy and advantage of the server and of the average client, in per cent; None where a table prints none."""

    server_accuracy: float | None
    server_advantage: float | None
    client_accuracy: float | None
    client_advantage: float | None

    def __str__(self) -> str:
        server, clients = (self[:2], self[2:])
        parts = [
            f"{name} {' / '.join('-' if value is None else f'{value:.2f}' for value in pair)}"
            for name, pair in (("server", server), ("clients", clients))
            if any(value is not None for value in pair)
        ]
        return ", ".join(parts)


# Table 2: accuracy and advantage by client for FedAvg(100k), FedAvg(30k), Local (accuracy only) and MaPP-FL.
SIZES = (17020, 7400, 7040, 6310, 4060, 3110, 1660, 1650, 1260, 490)
TABLE_2 = {
    ("none", "mapp-cnn-16"): (78.2, (2.82, 3.48, 3.44, 3.78, 4.66, 3.57, 5.48, 6.67, 3.97, 9.8)),
    ("none", "mapp-cnn-8"): (68.57, (0.66, 1.86, 1.44, 2.14, 2.73, 2.12, 6.69, 5.94, 4.21, 5.31)),
}
TABLE_2_LOCAL = (None, None, 61.57, 59.12, 55.29, 53.91, 50.49, 51.62, 49.74, 41.53)
TABLE_2_MAPP = (
    (77.14, 77.14, 66.3, 63.95, 66.3, 65.84, 66.3, 65.84, 68.48, 68.48),
    (4.42, 4.02, 1.52, 2.04, 2.81, 0.35, 6.33, 1.52, 1.75, 5.92),
)
TABLE_2_SERVER = {
    ("none", "mapp-cnn-16"): (78.29, 2.26),
    ("none", "mapp-cnn-8"): (68.73, 1.16),
    ("mapp-fl", "mapp-cnn-16"): (76.54, 1.42),
}

# Table 3: Pearson's r of log10 dataset size and advantage, by data set and network.
_TABLE_3 = {
    "cifar10": (-0.62, -0.65, -0.57, -0.87),
    "cifar100": (-0.54, -0.70, -0.85, -0.90),
    "femnist": (-0.71, -0.65, -0.63, -0.75),
}
TABLE_3 = {(data, model): value for data, row in _TABLE_3.items() for model, value in zip(PARAMETERS, row, strict=True)}

# Table 4, by data set and number of large clients (0 to 9). Columns: server accuracy and advantage of FDropout,
# HeteroFL and MaPP-FL, then the same for the average client.
_TABLE_4 = {
    "cifar10": """
        59.22 0.53 70.43 1.91 44.03 0.67 37.74 1.80 70.31 2.98 69.42 2.91
        73.95 1.78 75.32 3.77 76.32 2.64 41.23 2.46 69.25 3.40 69.42 3.07
        76.30 2.44 77.86 3.77 77.66 3.01 40.68 2.84 68.75 3.64 68.02 3.38
        77.98 2.67 78.38 3.55 78.26 3.05 44.11 2.94 70.11 3.96 68.04 3.15
        78.57 3.13 78.92 3.39 78.36 3.01 45.37 2.96 71.09 4.49 68.25 3.32
        78.11 3.54 79.02 2.95 79.12 2.52 52.07 2.97 70.74 4.38 68.95 3.26
        79.31 3.27 78.75 3.99 78.59 2.75 56.72 3.47 72.09 5.02 68.67 4.13
        78.98 3.72 79.11 3.50 78.52 2.85 62.58 4.35 73.43 5.33 69.72 4.23
        79.26 3.59 78.93 3.33 78.89 3.56 67.55 4.17 73.68 5.56 71.16 4.48
        79.06 3.19 79.07 2.78 78.33 3.26 73.22 4.29 74.77 5.05 72.93 4.53""",
    "cifar100": """
        22.61 -0.16 34.71 0.10 10.62 -0.45 8.89 1.25 34.78 2.86 32.74 2.84
        36.66 0.86 39.19 3.41 41.03 2.45 10.94 2.14 32.66 4.95 32.22 3.79
        42.32 1.63 43.86 3.33 42.50 1.87 12.99 2.40 32.65 5.82 31.43 3.77
        43.21 1.64 45.15 2.59 44.62 2.43 16.16 2.84 34.08 6.18 31.63 4.32
        44.42 2.13 45.52 2.99 44.48 1.61 20.23 3.54 35.00 6.27 32.31 4.58
        45.20 2.55 46.13 2.38 45.92 2.15 24.48 4.47 36.57 6.16 32.89 5.15
        45.59 3.16 45.81 2.96 45.53 2.41 28.53 4.81 37.52 6.63 34.23 5.40
        46.47 2.56 45.61 2.33 45.31 3.01 33.69 5.14 38.61 6.64 35.46 5.59
        46.17 2.03 46.04 1.96 45.40 2.49 37.76 6.21 40.30 6.99 38.10 6.18
        45.95 2.60 46.30 2.08 45.61 2.52 41.70 6.03 42.18 7.47 41.49 6.52""",
    "femnist": """
        79.83 2.29 85.37 5.59 31.30 2.83 41.82 8.32 85.29 10.00 84.42 9.56
        84.68 2.81 80.55 4.43 83.25 4.73 48.12 8.24 83.78 12.61 82.88 11.00
        85.49 3.69 82.73 6.13 85.49 5.47 47.63 9.08 83.08 13.61 82.67 11.34
        85.60 5.57 84.16 6.95 85.68 6.45 47.04 10.34 82.83 14.54 81.72 12.02
        86.32 5.91 84.95 8.68 86.60 7.10 48.46 10.76 83.26 14.63 81.88 12.71
        86.42 7.75 85.28 8.87 86.22 7.75 54.12 11.25 82.87 15.27 80.77 13.47
        86.85 8.31 86.22 9.49 86.50 8.45 58.52 11.47 83.15 16.07 80.38 13.83
        86.89 9.34 86.59 9.17 86.97 8.51 66.02 12.86 83.40 16.03 80.46 13.82
        86.43 9.21 86.26 8.99 86.67 9.05 71.44 12.54 83.42 16.19 80.06 13.45
        86.55 8.83 86.84 8.91 86.76 8.91 78.82 12.50 84.14 15.46 81.18 13.37""",
}
RIVALS = ("fdropout", "heterofl", "mapp-fl")
TABLE_4 = {
    (data, large, name): Printed(*row[2 * index : 2 * index + 2], *row[6 + 2 * index : 8 + 2 * index])
    for data, text in _TABLE_4.items()
    for large, line in enumerate(text.strip().splitlines())
    for row in [[float(cell) for cell in line.split()]]
    for index, name in enumerate(RIVALS)
}

# Table 5: CIFAR-10 with two large clients, by rule and network of the server.
TABLE_5 = {
    ("none", "mapp-cnn-16"): Printed(78.17, 2.03, 76.64, 4.53),
    ("none", "mapp-cnn-8"): Printed(69.23, 0.78, 67.66, 2.65),
    ("local", "mapp-cnn-16"): Printed(None, None, 52.52, None),
    ("osr", "mapp-cnn-16"): Printed(76.69, 1.64, 30.64, 1.62),
    ("osm", "mapp-cnn-16"): Printed(78.05, 2.04, 59.63, 2.85),
    ("heterofl-r", "mapp-cnn-16"): Printed(78.13, 2.94, 69.73, 4.12),
    ("heterofl", "mapp-cnn-16"): Printed(78.26, 2.51, 69.76, 3.80),
    ("gsr", "mapp-cnn-16"): Printed(76.11, 2.11, 40.07, 1.81),
    ("mapp-fl", "mapp-cnn-16"): Printed(77.00, 1.49, 68.26, 2.99),
    ("mapp-fl-r", "mapp-cnn-16"): Printed(77.72, 1.83, 67.62, 2.60),
    ("ufr", "mapp-cnn-16"): Printed(77.59, 1.01, 63.33, 2.54),
    ("fdropout", "mapp-cnn-16"): Printed(76.42, 1.9, 42.06, 2.05),
}

# Table 6: CIFAR-10 with two large clients, by rule; True: inputs and outputs are drawn independently.
TABLE_6 = {
    ("fdropout", True): Printed(75.44, 2.57, 23.56, 1.74),
    ("fdropout", False): Printed(76.38, 2.45, 39.99, 2.32),
    ("mapp-fl-r", True): Printed(76.41, 2.87, 55.82, 3.00),
    ("mapp-fl-r", False): Printed(77.11, 3.34, 62.80, 3.20),
}
