"""Names, order and number formats of the measures."""

from __future__ import annotations

from collections.abc import Iterable

from secateur.report.summary import SummaryCell

ATTACK = {
    "auc": "AUC",
    "attack_accuracy": "attack accuracy",
    "balanced_accuracy": "balanced accuracy",
    "advantage": "advantage",
    "tpr_at_fpr_0.1": "TPR at 10 % FPR",
    "tpr_at_fpr_0.01": "TPR at 1 % FPR",
    "tpr_at_fpr_0.001": "TPR at 0.1 % FPR",
}
MODEL = {
    "test_accuracy": "test accuracy",
    "train_accuracy": "train accuracy",
    "generalisation_gap": "generalisation gap",
    "confidence_gap": "confidence gap",
    "sensitivity_gap": "sensitivity gap",
    "sensitivity_gap_size": "sensitivity gap, size",
    "epsilon": "ε of fine-tuning",
}
COST = {
    "nonzero_parameters": "non-zero parameters",
    "conv_weights_masked": "conv weights, masked",
    "conv_weights_removed": "conv weights, removed",
} | {
    f"{name}_{form}": f"{title}, {form}"
    for name, title in {"parameters": "parameters", "flops": "FLOPs", "bytes": "bytes", "seconds": "latency"}.items()
    for form in ("masked", "removed")
}
PICTURE = {
    "psnr": "PSNR",
    "ssim": "SSIM",
    "cw_ssim": "CW-SSIM",
    "lpips": "LPIPS",
    "mse": "MSE",
    "nmi_256": "NMI, 256 levels",
    "nmi_256_chance": "NMI by chance",
    "ami_256": "AMI, 256 levels",
}
RECOVERY = {
    "psnr": "PSNR",
    "psnr_median": "PSNR, median",
    "psnr_min": "PSNR, lowest",
    "psnr_max": "PSNR, highest",
    "psnr_grey": "PSNR of grey",
    "ssim": "SSIM",
    "cw_ssim": "CW-SSIM",
    "lpips": "LPIPS",
    "recognisable": "recognisable",
    "identified": "nearest its own",
    "label_accuracy": "labels right",
    "recovered": "recovered",
}
BESIDE = {
    **{name: title for name, title in PICTURE.items() if name not in RECOVERY},
    "diverged": "diverged",
    "failed": "targets failed",
    "attack_loss": "attack's loss",
    "seconds": "seconds",
}
STUDIED = {
    "ratio": "of dense",
    "paper_ratio": "of dense, as the paper counts",
    "defense_seconds": "seconds an epoch",
    "user_seconds": "seconds with the gradients",
    "epoch_seconds": "seconds an epoch",
    "residual_mean": "residual's norm",
    "never_sent": "entries never sent",
}
TITLES = ATTACK | MODEL | COST | RECOVERY | BESIDE
SHARES = frozenset(
    {"test_accuracy", "train_accuracy", "conv_weights_masked", "conv_weights_removed"}
    | {"recognisable", "identified", "identified_chance", "label_accuracy", "recovered", "failed"}
    | set(ATTACK)
) - {"auc", "advantage"}
DECIBELS = "psnr"  # the prefix of measures in dB


def title(metric: str) -> str:
    """Return the title of a measure."""
    return (TITLES | STUDIED).get(metric, metric.replace("_", " "))


def ordered(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the measures in `names`: first those in `known`, in that order, then the others."""
    names = dict.fromkeys(names)
    first = [name for name in known if name in names]
    return first + [name for name in names if name not in first]


def shown(cell: SummaryCell | None, metric: str, interval: bool = True) -> str:
    """Format a number with its interval: shares in per cent, counts with separators or in millions.

    Example:
        >>> shown(Cell(0.975, 0.955, 0.987), "test_accuracy"), shown(Cell(25978, None, None), "bytes_masked")
        ('97.5% [95.5, 98.7]', '25,978')
    """
    if cell is None or cell.value is None:
        return "-"
    if metric in SHARES:
        return _number(cell, interval, 100, 1, "%")
    if metric.startswith(DECIBELS):
        return _number(cell, interval, 1, 1, " dB")
    if metric == "attack_loss":
        return f"{cell.value:.3g}"
    if metric == "seconds":
        return f"{cell.value:.1f} s"
    if metric in TITLES and metric not in (*COST, "diverged", "failed"):
        return _number(cell, interval, 1, 3, "")
    if metric.startswith("seconds"):
        return f"{1000 * cell.value:.2f} ms"
    return _count(cell.value) if float(cell.value).is_integer() else f"{cell.value:.3f}"


def _count(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.2f} {letter}"
    return f"{value:,.0f}"


def _number(cell: SummaryCell, interval: bool, scale: float, digits: int, unit: str) -> str:
    value, *ends = (None if x is None else f"{scale * x:.{digits}f}" for x in (cell.value, cell.low, cell.high))
    with_interval = interval and None not in ends and cell.low != cell.high  # no width: there is one target
    return f"{value}{unit} [{', '.join(map(str, ends))}]" if with_interval else f"{value}{unit}"
