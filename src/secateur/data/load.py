"""Loading of data sets: one of the catalogue, or the user's own from a .npz file, an image folder or a function.

Images are read with PIL, in common formats only and up to a largest size.
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
from secateur.data.dataset import Dataset, normalise_bytes
from secateur.errors import WrongInput, unknown

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "PPM")  # no EPS: PIL would start another program for it
LARGEST = 1 << 24  # pixels
FOLDERS = "pictures must be in one sub-folder for each class"


def load(source: str, folder: Path | str | None = None, download: bool = True) -> Dataset:
    """Return a data set by its catalogue name, or the user's `.npz`, image folder or `module:function`.

    A catalogue data set is searched for in `folder`, else in $SECATEUR_DATA and the cache. If it is in none of them,
    it is downloaded, unless `download` is off. The user's own data are scaled as in `from_arrays`. Write a folder that
    has the name of a catalogue data set with a slash (./digits).

    Example:
        >>> load("digits").input_shape
        (1, 8, 8)
    """
    known = methods("dataset")
    if source in known:
        where = None if folder is None else Path(folder).expanduser()
        dataset: Dataset = known[source](folder=where, download=download)
        if dataset.verified is False:
            _warn_unverified(source)
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
        allowed = f"a .npz file, a folder of images, or a name: {', '.join(known)}"
        raise WrongInput("data", f"{source} does not exist; allowed: {allowed}")
    raise unknown("data", source, known)


@functools.cache  # once a process
def _warn_unverified(name: str) -> None:
    """Warn that the files of a data set are not the published ones."""
    message = "data: the files of %s are not the published ones (another checksum, or some are missing)"
    logging.getLogger("secateur").warning(message, name)


def from_npz(path: Path) -> Dataset:
    """Return the data set of a .npz file.

    The file holds `inputs` or `x`, `labels` or `y`, and optionally `train_size` and `writers`; see `from_arrays`.
    """
    arrays = read_npz(path)
    inputs, labels = arrays.get("inputs", arrays.get("x")), arrays.get("labels", arrays.get("y"))
    if inputs is None or labels is None:
        held = ", ".join(arrays) or "nothing"
        wanted = "inputs (or x) and labels (or y), optionally train_size and writers"
        raise WrongInput("data", f"{path} holds {held}; it must hold {wanted}")
    return from_arrays(path.stem, inputs, labels, arrays.get("train_size"), arrays.get("writers"))


def from_image_folder(path: Path) -> Dataset:
    """Return the data set of a folder of images: one sub-folder for each class, in alphabetical order.

    All images have one size. The data set is gray if all images are gray, else colour. Pixels are scaled and
    standardised as in `from_arrays`.
    """
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    pictures: list[np.ndarray] = []
    labels: list[int] = []
    for member, stream in contents(path):
        inside = member.parts[1:]
        if any(part.startswith(".") for part in inside):
            continue
        if len(inside) != 2:
            raise WrongInput("data", f"{path} holds {'/'.join(inside)}; {FOLDERS}")
        picture = read_image(stream, f"{path}/{'/'.join(inside)}", gray=True)
        if pictures and picture.shape[1:] != pictures[0].shape[1:]:
            sizes = [f"{shape[2]} x {shape[1]}" for shape in (pictures[0].shape, picture.shape)]
            raise WrongInput("data", f"{path} holds pictures of {' and of '.join(sizes)} pixels; use one size")
        pictures.append(picture)
        labels.append(classes.index(inside[0]))
    if not pictures:
        raise WrongInput("data", f"{path} holds no pictures; {FOLDERS}")
    channels = max(len(picture) for picture in pictures)
    pixels = np.stack([np.broadcast_to(picture, (channels, *picture.shape[1:])) for picture in pictures])
    return from_arrays(path.resolve().name, pixels, labels)


def read_image(stream: BinaryIO, name: object, size: tuple[int, int] | None = None, gray: bool = False) -> np.ndarray:
    """Return the pixels of an image as (channels, height, width) bytes.

    Args:
        stream: the image file.
        name: the image's name in an error.
        size: (width, height) to resize to, by antialiased bilinear interpolation; None keeps the size.
        gray: True to give a gray image one channel; otherwise every image has three.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(stream.read()), formats=FORMATS) as image:
            if image.width * image.height > LARGEST:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            picture = image.convert("L" if gray and image.mode in ("1", "L") else "RGB")
    except Exception as error:  # PIL's plugins fail in many ways on a damaged file
        allowed = ", ".join(FORMATS)
        raise WrongInput("data", f"{name} is not a readable picture ({error}); allowed: {allowed}") from error
    if size is not None:
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def from_function(reference: str) -> Dataset:
    """Return the data set that the user's `module:function` returns when called without arguments.

    The module is on Python's path or in the current folder. The function returns a Dataset or (inputs, labels), which
    go to `from_arrays`.
    """
    function = users_own("data", reference)
    try:
        returned = function()
    except Exception as error:  # the user's code may raise anything
        raise WrongInput("data", f"{reference} failed with {type(error).__name__}: {error}") from error
    if isinstance(returned, Dataset):
        return returned
    if not isinstance(returned, tuple) or len(returned) != 2:
        kind = type(returned).__name__
        raise WrongInput("data", f"{reference} returned {kind}; it must return a Dataset or (inputs, labels)")
    return from_arrays(reference, *returned)


def from_arrays(name: str, inputs: Any, labels: Any, train_size: Any = None, writers: Any = None) -> Dataset:
    """Return a data set from arrays or tensors.

    Bytes (uint8) with three or four axes are images, (N, H, W), (N, H, W, C) or (N, C, H, W). They are scaled to
    [0, 1], then every channel is standardised to mean 0 and deviation 1 over the pool. Other numbers stay unchanged.
    """
    values, targets = _array("inputs", inputs), _integers("labels", labels)
    if values.dtype.kind not in "biuf" or values.ndim < 2 or values.size == 0 or len(values) != len(targets):
        sizes = f"{values.dtype} of shape {values.shape} and {len(targets)} labels"
        raise WrongInput("inputs", f"{name} has {sizes}; use numbers, one row for every label")
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
    return Dataset(name, normalise_bytes(pixels, mean, std), targets, classes, size, authors, mean, std)


def _array(field: str, values: Any) -> np.ndarray:
    """Return values as an array on the CPU, or raise WrongInput for the field."""
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongInput(field, f"not readable as an array of numbers ({error})") from error


def _integers(field: str, values: Any) -> Tensor:
    """Return whole numbers, (n,) int64, or raise WrongInput for the field."""
    array = _array(field, values)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise WrongInput(field, f"{array.dtype} of shape {array.shape} is not allowed; use whole numbers in one axis")
    return torch.from_numpy(array.astype(np.int64))


def _channels_first(pixels: np.ndarray) -> np.ndarray:
    """Return images as (N, C, H, W).

    Axis 3 is the channels if its size is 1, 3 or 4 and the size of axis 1 is not.
    """
    if pixels.ndim == 3:
        return pixels[:, None]
    last = pixels.shape[3] in (1, 3, 4) and pixels.shape[1] not in (1, 3, 4)
    return pixels.transpose(0, 3, 1, 2) if last else pixels


def _statistics(channel: np.ndarray) -> tuple[float, float]:
    """Return the mean and deviation in [0, 1] from the counts of the 256 values: exact, and without a float copy."""
    counts = np.zeros(256)
    for part in np.array_split(channel, 1 + len(channel) // 1024):
        counts += np.bincount(part.reshape(-1), minlength=256)
    values = np.arange(256) / 255
    mean = float(np.average(values, weights=counts))
    return mean, float(np.average((values - mean) ** 2, weights=counts)) ** 0.5 or 1.0
