"""Pictures read with PIL: common formats only, of a sensible size."""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np

from secateur.errors import WrongInput

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "PPM")  # no EPS: PIL would start another program for it
LARGEST = 1 << 24  # pixels


def read_image(stream: BinaryIO, name: object, size: tuple[int, int] | None = None, gray: bool = False) -> np.ndarray:
    """(channels, height, width) bytes: one channel for a gray picture where `gray` allows it, else three.

    `size` resizes with antialiased bilinear interpolation.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(stream.read()), formats=FORMATS) as image:
            if image.width * image.height > LARGEST:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            picture = image.convert("L" if gray and image.mode in ("1", "L") else "RGB")
    except Exception as error:  # PIL's plugins fail in many ways on a damaged file
        raise WrongInput(
            "data", f"{name} is not a readable picture ({error}); allowed: {', '.join(FORMATS)}"
        ) from error
    if size is not None:
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
