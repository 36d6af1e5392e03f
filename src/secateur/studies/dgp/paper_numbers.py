"""Numbers printed in dgp, by the names used here; its "SSIM" is CW-SSIM, and all other results are plots."""

from __future__ import annotations

# Columns of Table 1 by defense and, for ATS, by the picture that a reconstruction is compared with.
COLUMNS = {
    ("none", ""): "Baseline",
    ("ats", "used"): "ATS-R",
    ("ats", "raw"): "ATS-T",
    ("soteria", ""): "Soteria",
    ("precode", ""): "PRECODE",
    ("noise", ""): "DP",
    ("top-k", ""): "Top-k",
    ("outpost", ""): "Outpost",
    ("dgp", ""): "DGP",
}
_TABLE_1 = {
    ("r-gap", "lpips"): (7.7e-4, 1.3e-4, 0.020, 0.378, None, 0.373, 0.379, 0.378, 0.375),
    ("r-gap", "cw_ssim"): (0.965, 0.989, 0.870, 0.252, None, 0.259, 0.249, 0.250, 0.248),
    ("ig", "lpips"): (0.003, 4.5e-4, 0.108, 0.190, 0.371, 0.268, 0.029, 0.088, 0.316),
    ("ig", "cw_ssim"): (0.954, 0.981, 0.566, 0.368, 0.257, 0.333, 0.769, 0.640, 0.287),
    ("gi", "lpips"): (0.004, 0.003, 0.094, 0.201, 0.453, 0.343, 0.045, 0.111, 0.382),
    ("gi", "cw_ssim"): (0.918, 0.908, 0.563, 0.362, 0.247, 0.305, 0.697, 0.612, 0.199),
    ("rob", "lpips"): (0.023, 0.028, 0.150, 0.023, 0.025, 0.023, 0.523, 0.295, 0.527),
    ("rob", "lpips_min"): (7.43e-15, 5.03e-15, 0.011, 7.79e-15, 5.52e-15, 8.79e-07, 0.231, 0.195, 0.243),
    ("rob", "cw_ssim"): (0.933, 0.926, 0.514, 0.933, 0.929, 0.899, 0.038, 0.221, 0.051),
    ("rob", "cw_ssim_max"): (1.000, 1.000, 0.931, 1.000, 1.000, 1.000, 0.224, 0.310, 0.365),
}
# Table 1: by attack, measure and column.
TABLE_1 = {
    (*key, column): value for key, row in _TABLE_1.items() for column, value in zip(COLUMNS.values(), row, strict=True)
}

# Table 1's last row, the accuracy; both columns of ATS share one cell.
ACCURACY = {
    "none": 0.9362,
    "ats": 0.9314,
    "soteria": 0.9290,
    "precode": 0.9283,
    "noise": 0.7601,
    "top-k": 0.9344,
    "outpost": 0.9296,
    "dgp": 0.9340,
}

# Table 2: LPIPS and CW-SSIM by k1, k2 and attack, and accuracy by k1 and k2.
TABLE_2 = {
    (0.03, 0.45, "rob"): (0.426, 0.146),
    (0.05, 0.75, "rob"): (0.527, 0.051),
    (0.06, 0.90, "rob"): (0.531, 0.029),
    (0.05, 0.75, "ig"): (0.316, 0.287),
    (0.10, 0.70, "ig"): (0.351, 0.250),
    (0.20, 0.60, "ig"): (0.383, 0.234),
}
TABLE_2_ACCURACY = {
    (0.03, 0.45): 0.9342,
    (0.05, 0.75): 0.9340,
    (0.06, 0.90): 0.9291,
    (0.10, 0.70): 0.9321,
    (0.20, 0.60): 0.9282,
}

# By network and defense. Table 3: MB of one upload and one download. Table 4: seconds per epoch.
TABLE_3 = {
    "lenet-zhu": {"none": 0.121, "soteria": 0.098, "precode": 4.631, "top-k": 0.074, "dgp": 0.074, "adgp": 0.038},
    "vgg11-bn": {"none": 70.428, "soteria": 70.413, "precode": 73.436, "top-k": 43.137, "dgp": 43.137, "adgp": 22.449},
    "resnet18": {"none": 85.251, "soteria": 85.235, "precode": 88.258, "top-k": 52.216, "dgp": 52.216, "adgp": 27.174},
    "cnn6": {"none": 1.177, "soteria": 0.959, "precode": 19.955, "top-k": 0.721, "dgp": 0.721, "adgp": 0.375},
}
TABLE_4 = {
    "lenet-zhu": {"soteria": 52.460, "top-k": 0.113, "dgp": 0.146, "adgp": 0.167},
    "vgg11-bn": {"soteria": 331.379, "top-k": 0.419, "dgp": 0.764, "adgp": 0.842},
    "resnet18": {"soteria": 862.567, "top-k": 0.967, "dgp": 1.803, "adgp": 2.587},
    "cnn6": {"soteria": 291.419, "top-k": 0.100, "dgp": 0.237, "adgp": 0.256},
}

# Tables 5 and 6: LPIPS and CW-SSIM by data set, attack, network and defense.
_NETWORKS = ("cnn6", "lenet-zhu", "resnet18", "vgg11-bn")
_MODELS = {
    ("cifar10", "rob", "none"): ((0.0216, 0.9273), (0.0226, 0.9293), (0.0231, 0.9328), (0.0272, 0.9328)),
    ("cifar10", "rob", "dgp"): ((0.4421, 0.1335), (0.3031, 0.2364), (0.5273, 0.0511), (0.5079, 0.0464)),
    ("cifar10", "ig", "none"): ((0.0308, 0.7735), (0.0788, 0.6745), (0.0028, 0.9539), (0.0303, 0.8084)),
    ("cifar10", "ig", "dgp"): ((0.2349, 0.4375), (0.2537, 0.3785), (0.3163, 0.2866), (0.2845, 0.3269)),
    ("cifar100", "rob", "none"): ((0.0212, 0.9298), (0.0322, 0.9273), (0.0297, 0.9322), (0.0248, 0.9157)),
    ("cifar100", "rob", "dgp"): ((0.4726, 0.1177), (0.3782, 0.2257), (0.4643, 0.1474), (0.4677, 0.1209)),
    ("cifar100", "ig", "none"): ((0.0521, 0.7551), (0.1042, 0.6849), (0.0021, 0.9522), (0.0297, 0.8057)),
    ("cifar100", "ig", "dgp"): ((0.2996, 0.3792), (0.3163, 0.3781), (0.3747, 0.2550), (0.3237, 0.2991)),
}
TABLE_5_6 = {
    (data, attack, model, defense): pair
    for (data, attack, defense), pairs in _MODELS.items()
    for model, pair in zip(_NETWORKS, pairs, strict=True)
}

# Table 7: accuracy on CIFAR-100 by defense (Top-k at 95 %, DGP at 80 %) and network.
TABLE_7 = {
    ("top-k", "resnet18"): 0.7368,
    ("top-k", "lenet-zhu"): 0.2675,
    ("top-k", "cnn6"): 0.4519,
    ("top-k", "vgg11-bn"): 0.6807,
    ("dgp", "resnet18"): 0.7404,
    ("dgp", "lenet-zhu"): 0.3242,
    ("dgp", "cnn6"): 0.4724,
    ("dgp", "vgg11-bn"): 0.6860,
}
