"""The one door to data: a known name, or the user's own.

The user's own data: a .npz file, a folder of images, or a function.

Pictures read with PIL: common formats only, of a sensible size.
"""

from __future__ import annotations

import functools
import io
import logging
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from secateur.catalogue import methods, users_own
from secateur.data.archives import contents, read_npz
from secateur.data.dataset import Dataset, normalised
from secateur.errors import WrongInput, unknown

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


def from_npz(path: Path) -> Dataset:
    """Arrays `inputs` or `x` and `labels` or `y`; optional `train_size` and `writers`; see `from_arrays`."""
    arrays = read_npz(path)
    inputs, labels = arrays.get("inputs", arrays.get("x")), arrays.get("labels", arrays.get("y"))
    if inputs is None or labels is None:
        held = ", ".join(arrays) or "nothing"
        raise WrongInput(
            "data", f"{path} holds {held}; wanted: inputs (or x), labels (or y), optional train_size, writers"
        )
    return from_arrays(path.stem, inputs, labels, arrays.get("train_size"), arrays.get("writers"))


def from_arrays(name: str, inputs: Any, labels: Any, train_size: Any = None, writers: Any = None) -> Dataset:
    """A data set from arrays or tensors.

    Bytes (uint8) with three or four axes are pictures, (N, H, W), (N, H, W, C) or (N, C, H, W): they are scaled to
    [0, 1], then every channel is standardised to mean 0 and deviation 1 over the pool. All else is taken as it is.
    """
    values, targets = _array("inputs", inputs), _integers("labels", labels)
    if values.dtype.kind not in "biuf" or values.ndim < 2 or values.size == 0 or len(values) != len(targets):
        shape = f"{values.dtype} of shape {values.shape}"
        raise WrongInput(
            "inputs", f"{name} has {shape} and {len(targets)} labels; wanted: numbers, one row for every label"
        )
    size = len(values) if train_size is None else int(_integers("train_size", [train_size])[0])
    authors = None if writers is None else _integers("writers", writers)
    classes = int(targets.max()) + 1 if len(targets) else 0
    if classes > len(targets) or (len(targets) and int(targets.min()) < 0):
        low, high = int(targets.min()), int(targets.max())
        raise WrongInput("labels", f"{name} has labels from {low} to {high} in {len(targets)} rows; number them from 0")
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        return Dataset(name, torch.from_numpy(values.astype(np.float32, order="C")), targets, classes, size, authors)
    pixels = _channels_first(values)
    mean, std = zip(*(_statistics(pixels[:, channel]) for channel in range(pixels.shape[1])), strict=True)
    return Dataset(name, normalised(pixels, mean, std), targets, classes, size, authors, mean, std)


def _statistics(channel: np.ndarray) -> tuple[float, float]:
    """Mean and deviation in [0, 1] from the counts of the 256 values, exact and without a copy in floats."""
    counts = np.zeros(256)
    for part in np.array_split(channel, 1 + len(channel) // 1024):
        counts += np.bincount(part.reshape(-1), minlength=256)
    values = np.arange(256) / 255
    mean = float(np.average(values, weights=counts))
    return mean, float(np.average((values - mean) ** 2, weights=counts)) ** 0.5 or 1.0


def _integers(field: str, values: Any) -> Tensor:
    array = _array(field, values)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise WrongInput(field, f"{array.dtype} of shape {array.shape} is not allowed; give whole numbers in one axis")
    return torch.from_numpy(array.astype(np.int64))


def _array(field: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongInput(field, f"not readable as an array of numbers ({error})") from error


def _channels_first(pixels: np.ndarray) -> np.ndarray:
    if pixels.ndim == 3:
        return pixels[:, None]
    last = pixels.shape[3] in (1, 3, 4) and pixels.shape[1] not in (1, 3, 4)
    return pixels.transpose(0, 3, 1, 2) if last else pixels


def from_image_folder(path: Path) -> Dataset:
    """One sub-folder a class, in alphabetical order, with pictures of one size; scaled and standardised as above.

    Gray where all pictures are gray, else colour.
    """
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    pictures: list[np.ndarray] = []
    labels: list[int] = []
    for member, stream in contents(path):
        inside = member.parts[1:]
        if any(part.startswith(".") for part in inside):
            continue
        if len(inside) != 2:
            raise WrongInput(
                "data", f"{path} holds {'/'.join(inside)}; wanted: one sub-folder a class, with pictures in it"
            )
        picture = read_image(stream, f"{path}/{'/'.join(inside)}", gray=True)
        if pictures and picture.shape[1:] != pictures[0].shape[1:]:
            sizes = [f"{shape[2]} x {shape[1]}" for shape in (pictures[0].shape, picture.shape)]
            raise WrongInput(
                "data", f"{path} holds pictures of {sizes[0]} and of {sizes[1]} pixels; all must have one size"
            )
        pictures.append(picture)
        labels.append(classes.index(inside[0]))
    if not pictures:
        raise WrongInput("data", f"{path} holds no pictures; wanted: one sub-folder a class, with pictures in it")
    channels = max(len(picture) for picture in pictures)
    pixels = np.stack([np.broadcast_to(picture, (channels, *picture.shape[1:])) for picture in pictures])
    return from_arrays(path.resolve().name, pixels, labels)


def from_function(reference: str) -> Dataset:
    """`module:function`, called without arguments, in a module that Python finds or in the current folder.

    It returns a Dataset or (inputs, labels), which `from_arrays` takes.
    """
    function = users_own("data", reference)
    try:
        made = function()
    except Exception as error:  # whatever the user's own code raises
        raise WrongInput("data", f"{reference} failed with {type(error).__name__}: {error}") from error
    if isinstance(made, Dataset):
        return made
    if not isinstance(made, tuple) or len(made) != 2:
        raise WrongInput("data", f"{reference} returned {type(made).__name__}; allowed: a Dataset or (inputs, labels)")
    return from_arrays(reference, *made)


def load(source: str, folder: Path | str | None = None, download: bool = True) -> Dataset:
    """A data set by its catalogue name, or the user's `.npz`, image folder or `module:function`.

    A known data set is looked for in `folder`, else in $SECATEUR_DATA and the cache, else downloaded unless `download`
    is off. In the user's own data, pictures as bytes (uint8) are scaled to [0, 1] and then every channel is
    standardised; all other numbers are taken as they are. A folder that has the name of a known data set is written
    with a slash (./digits).

    Example:
        >>> load("digits").input_shape
        (1, 8, 8)
    """
    known = methods("dataset")
    if source in known:
        dataset: Dataset = known[source](
            folder=None if folder is None else Path(folder).expanduser(), download=download
        )
        if dataset.verified is False:
            _tell(source)
        return dataset
    path = Path(source).expanduser()
    if path.is_dir():
        return from_image_folder(path)
    if path.suffix == ".npz" and path.is_file():
        return from_npz(path)
    if path.exists():
        raise WrongInput("data", f"{source} is not readable as data; allowed: a .npz file, a folder of images")
    module, colon, function = source.partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), function]):
        return from_function(source)
    if "/" in source or path.suffix:
        raise WrongInput(
            "data", f"{source} does not exist; give a .npz file, a folder of images, or a name: {', '.join(known)}"
        )
    raise unknown("data", source, known)


@functools.cache  # once a process
def _tell(name: str) -> None:
    message = (
        "data: the files of %s are not the published ones (another checksum, or not all of them); used as they are"
    )
    logging.getLogger("secateur").warning(message, name)
