"""Numbers printed in samia_ppb, and results of its authors' code; all other results in the paper are plots."""

from __future__ import annotations

_TABLE_1 = {
    "cifar10": (0.0477, 0.0163, 0.2683),
    "cifar100": (0.1241, 0.0690, 0.0243),
    "svhn": (0.0060, 0.0012, 0.0005),
    "chmnist": (0.0078, 0.0052, -0.0058),
}
_NETWORKS = ("resnet18-pool", "densenet121", "vgg16-bn")

# Table 1: the share of the attack accuracy lost if sparsity and pruner are unknown, by data set and network.
TABLE_1 = {(data, model): x for data, row in _TABLE_1.items() for model, x in zip(_NETWORKS, row, strict=True)}

# The authors' code on Location with the MLP, one seed.
# Keys: data set, pruner, sparsity, defense, attack (not adaptive), measure.
# nn-cls and top3-nn were trained for 20 epochs, samia for 100.
AUTHORS_CODE = {
    ("location", "none", 0.0, "basic", "conf", "auc"): 0.908,
    ("location", "l1-unstructured", 0.7, "basic", "conf", "attack_accuracy"): 0.828,
    ("location", "l1-unstructured", 0.7, "basic", "conf", "auc"): 0.869,
    ("location", "l1-unstructured", 0.7, "basic", "conf", "tpr_at_fpr_0.01"): 0.044,
    ("location", "l1-unstructured", 0.7, "basic", "mentr", "attack_accuracy"): 0.830,
    ("location", "l1-unstructured", 0.7, "basic", "samia", "attack_accuracy"): 0.842,
    ("location", "l1-unstructured", 0.7, "basic", "nn-cls", "attack_accuracy"): 0.723,
    ("location", "l1-unstructured", 0.7, "basic", "top3-nn", "attack_accuracy"): 0.797,
}
