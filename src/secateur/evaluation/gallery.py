"""Pictures of reconstructions: PNG files in the run's folder, and figures for the page."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from secateur.evaluation.reconstruction import AttackOutcome
from secateur.runs.artifacts import explained, write

CAPTION = ("psnr", "ssim", "cw_ssim", "lpips")  # the measures under a picture
Figure = dict[str, Any]
Labels = Mapping[str, Any]


def png(pixels: Tensor) -> bytes:
    """Encode pixels (C, H, W) in [0, 1], grey or colour, as a PNG file."""
    from PIL import Image

    levels = (pixels * 255).round().clamp(0, 255).byte().cpu()
    image = Image.fromarray(levels[0].numpy() if len(levels) == 1 else levels.permute(1, 2, 0).numpy())
    content = io.BytesIO()
    image.save(content, format="PNG", optimize=True)
    return content.getvalue()


def picture(labels: Labels, pixels: Tensor | None, **more: Any) -> Figure:
    """Return a picture as a figure of the page; `pixels` is None if the run shows no pictures."""
    encoded = None if pixels is None else base64.b64encode(png(pixels)).decode()
    return {**labels, "kind": "picture", "png": encoded, **more}


def truths(labels: Labels, number: int, pixels: Tensor, names: Sequence[int], images: bool) -> list[Figure]:
    """Return figures of the training pictures of one target."""
    return [
        picture({**labels, "attack": None}, picture_pixels if images else None, target=number, item=i, label=name)
        for i, (picture_pixels, name) in enumerate(zip(pixels, names, strict=True))
    ]


def draw_figures(labels: Labels, numbers: Sequence[int], outcome: AttackOutcome, images: bool) -> list[Figure]:
    """Return figures of an attack's targets: every picture with its scores, and the curve of the attack's loss."""
    figures = []
    for i, (number, reconstruction) in enumerate(zip(numbers, outcome.reconstructions, strict=True)):
        values, pair = outcome.values(i), outcome.matches[i]
        for item, pixels in enumerate(pair.guess):
            more: Figure = {"target": number, "item": item, "label": pair.labels[item]}
            more["found"] = pair.returned is None or bool(pair.returned[item])
            more["scores"] = {name: to_plain(values[name][item]) for name in CAPTION if name in values}
            figures.append(picture(labels, pixels if images else None, **more))
        if reconstruction is not None and len(reconstruction.curve):
            points = [(step, to_plain(loss)) for step, loss in reconstruction.curve]
            figures.append({**labels, "kind": "loss", "target": number, "curve": points})
    return figures


def save(folder: Path, figures: Sequence[Figure]) -> None:
    """Write the pictures of the figures into `folder`; a file's name holds the seed, the target and the attack."""
    for figure in figures:
        if figure["kind"] == "picture" and figure["png"] is not None:
            settings = (figure.get("base_pruning"), figure.get("defense"))
            suffix = "".join(f"-{setting}" for setting in settings if setting not in (None, "none"))
            source = re.sub(r"[^\w.+-]+", "_", f"{figure['attack']}{suffix}" if figure["attack"] else "truth")[:120]
            name = f"seed{figure['seed']}-target{figure['target']:04d}-{figure['item']:02d}-{source}.png"
            with explained(folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write(folder / name, base64.b64decode(figure["png"]), private=True)


def to_plain(value: float) -> float | str | None:
    """Return a value for JSON, which has neither infinity nor NaN."""
    if value != value:
        return None
    return str(value) if value in (float("inf"), float("-inf")) else float(f"{value:.6g}")
