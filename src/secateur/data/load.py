"""Loading of data sets: one of the catalogue, or the user's own from a file, an image folder or a function.

Images are read with PIL, in common formats only and up to a largest size.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from secateur.catalogue import methods, users_own
from secateur.data.archives import contents, read_npz
from secateur.data.columns import ENDINGS, read_columns, read_table
from secateur.data.dataset import Dataset, Stats, normalise_bytes
from secateur.data.examples import read_examples
from secateur.data.scaling import AS_STORED, POOL, DataForm, apply_form
from secateur.errors import WrongInput, expand, unknown

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "PPM")  # no EPS: PIL would start another program for it
LARGEST = 1 << 24  # pixels
SIDES = ("train", "test")  # sub-folders of members and of others
FOLDERS = "pictures must be in one sub-folder for each class, or so in train and in test"


ALLOWED = "a .npz, .csv or .parquet file, a folder of images"
UNSAID = DataForm()


def load(source: str, folder: Path | str | None = None, download: bool = True, form: DataForm = UNSAID) -> Dataset:
    """Return a data set by its catalogue name, or the user's file, image folder or `module:function`.

    A catalogue data set is searched for in `folder`, else in $SECATEUR_DATA and the cache. If it is in none of them,
    it is downloaded, unless `download` is off. The user's own data are read as in `from_arrays`, and then scaled as
    `form` says. Write a folder that has the name of a catalogue data set with a slash (./digits).

    Example:
        >>> load("digits").input_shape
        (1, 8, 8)
    """
    known = methods("dataset")
    if source in known:
        where = None if folder is None else expand(folder)
        dataset: Dataset = known[source](folder=where, download=download)
        if dataset.verified is False:
            _warn_unverified(source)
        published = f"pixels standardised by the statistics of {source}" if dataset.mean else AS_STORED.name
        return apply_form(replace(dataset, scaling=published), form)
    path = expand(source)
    if path.is_dir():
        return from_image_folder(path, form)
    if path.suffix == ".npz" and path.is_file():
        return from_mapping(path.stem, read_npz(path), form)
    if path.suffix in ENDINGS and path.is_file():
        columns = read_columns("data", path)
        groups = None if form.group is None else columns.pop(form.group, None)
        table = read_table(path.name, columns, form.label)
        return _with_groups(from_arrays(path.stem, table.inputs, table.labels, form=form), groups)
    if path.exists():
        raise WrongInput("data", f"{source} is not readable as data; allowed: {ALLOWED}")
    module, colon, function = source.partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), function]):
        return from_function(source, form)
    if "/" in source or path.suffix:
        raise WrongInput("data", f"{source} does not exist; allowed: {ALLOWED}, or a name: {', '.join(known)}")
    raise unknown("data", source, known)


@functools.cache  # once a process
def _warn_unverified(name: str) -> None:
    """Warn that the files of a data set are not the published ones."""
    message = "data: the files of %s are not the published ones (another checksum, or some are missing)"
    logging.getLogger("secateur").warning(message, name)


def from_mapping(name: str, arrays: Mapping[str, Any], form: DataForm = UNSAID) -> Dataset:
    """Return the data set of named arrays, such as those of a .npz file.

    They are `inputs` or `x`, `labels` or `y`, and optionally `train_size`, `writers`, `mean` and `std`; see
    `from_arrays`. What `form` says of the scaling takes precedence over `mean` and `std`. The user's own column is
    `form.group`, by default `groups` if it is there.
    """
    inputs, labels = arrays.get("inputs", arrays.get("x")), arrays.get("labels", arrays.get("y"))
    if inputs is None or labels is None:
        held = ", ".join(arrays) or "nothing"
        wanted = "inputs (or x) and labels (or y), optionally train_size, writers, mean and std"
        raise WrongInput("data", f"{name} holds {held}; it must hold {wanted}")
    if "mean" in arrays and "std" in arrays and not form.says_scaling:
        form = replace(form, mean=_statistic("mean", arrays["mean"]), std=_statistic("std", arrays["std"]))
    data = from_arrays(name, inputs, labels, arrays.get("train_size"), arrays.get("writers"), form)
    return _with_groups(data, arrays.get(form.group or "groups"))


def _with_groups(data: Dataset, values: Any) -> Dataset:
    """Return the data set with the user's own column (N,), if there is one."""
    if values is None:
        return data
    column = _array("group", values)
    if column.ndim != 1:
        raise WrongInput(
            "group", f"the groups of {data.name} have the shape {column.shape}; use one value for each row"
        )
    return replace(data, groups=tuple(map(str, column.tolist())))


def _statistic(field: str, values: Any) -> Stats:
    """Return the numbers of a mean or a deviation, from an array of any shape."""
    array = _array(field, values)
    if array.dtype.kind not in "iuf" or not array.size or not np.isfinite(array).all():
        raise WrongInput(field, "must hold finite numbers, one for each channel")
    if field == "std" and not (array > 0).all():
        raise WrongInput(field, "must be above 0 for each channel")
    return tuple(array.astype(np.float64).reshape(-1).tolist())


def from_image_folder(path: Path, form: DataForm = UNSAID) -> Dataset:
    """Return the data set of a folder of images: one sub-folder for each class, in alphabetical order.

    Where the folder holds `train` and `test` alone, they hold the classes, and the pictures of `train` are the members.
    All images have one size, or are resized to squares of `form.resize` pixels. The data set is gray if all images are
    gray, else colour. Pixels are scaled and standardised as in `from_arrays`.
    """
    has_sides = set(_list_folders(path)) == set(SIDES) and all(_list_folders(path / side) for side in SIDES)
    folders = [path / side for side in SIDES] if has_sides else [path]
    classes = sorted({name for folder in folders for name in _list_folders(folder)})
    size = None if form.resize is None else (form.resize, form.resize)
    pictures: list[np.ndarray] = []
    labels: list[int] = []
    members = 0
    for member, stream in itertools.chain.from_iterable(map(contents, folders)):
        inside = member.parts[1:]
        if any(part.startswith(".") for part in inside):
            continue
        if len(inside) != 2:
            raise WrongInput("data", f"{path} holds {'/'.join(inside)}; {FOLDERS}")
        name = "/".join(member.parts if has_sides else inside)
        picture = read_image(stream, f"{path}/{name}", size, gray=True)
        if pictures and picture.shape[1:] != pictures[0].shape[1:]:
            sizes = [f"{shape[2]} x {shape[1]}" for shape in (pictures[0].shape, picture.shape)]
            raise WrongInput(
                "data", f"{path} holds pictures of {' and of '.join(sizes)} pixels; set resize to one size"
            )
        pictures.append(picture)
        labels.append(classes.index(inside[0]))
        members += member.parts[0] == SIDES[0]
    if not pictures:
        raise WrongInput("data", f"{path} holds no pictures; {FOLDERS}")
    channels = max(len(picture) for picture in pictures)
    pixels = np.stack([np.broadcast_to(picture, (channels, *picture.shape[1:])) for picture in pictures])
    return from_arrays(path.resolve().name, pixels, labels, members if has_sides else None, form=form)


def _list_folders(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]


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


def from_function(reference: str, form: DataForm = UNSAID) -> Dataset:
    """Return the data set that the user's `module:function` returns when called without arguments.

    The module is on Python's path or in the current folder. The function returns a Dataset of ours, a dictionary as in
    `from_mapping`, or examples as `secateur.audit` takes them (`read_examples`), which go to `from_arrays`.
    """
    function = users_own("data", reference)
    try:
        returned = function()
    except Exception as error:  # the user's code may raise anything
        raise WrongInput("data", f"{reference} failed with {type(error).__name__}: {error}") from error
    if isinstance(returned, Dataset):
        return apply_form(replace(returned, described=bool(returned.mean)), form)
    if isinstance(returned, Mapping):
        return from_mapping(reference, returned, form)
    return from_arrays(reference, *read_examples("data", returned, form.label), form=form)


def from_arrays(
    name: str, inputs: Any, labels: Any, train_size: Any = None, writers: Any = None, form: DataForm = UNSAID
) -> Dataset:
    """Return a data set from arrays or tensors.

    Bytes (uint8) with three or four axes are images, (N, H, W), (N, H, W, C) or (N, C, H, W). Unless `form` says
    another scaling, every channel is standardised to mean 0 and deviation 1 over the pool. Other whole numbers, such as
    tokens, stay whole. Other numbers stay unchanged.
    """
    values, targets = _array("inputs", inputs), _integers("labels", labels)
    if values.dtype.kind not in "biuf" or values.ndim < 2 or values.size == 0 or len(values) != len(targets):
        sizes = f"{values.dtype} of shape {values.shape} and {len(targets)} labels"
        raise WrongInput("inputs", f"{name} has {sizes}; use numbers, one row for every label")
    members = form.train_size if form.train_size is not None else train_size
    size = len(values) if members is None else int(_integers("train_size", [members])[0])
    authors = None if writers is None else _integers("writers", writers)
    classes = count_classes(name, targets, form.classes)
    is_pictures = values.ndim in (3, 4) and (values.dtype == np.uint8 or form.inputs_are == "pixels")
    pixels = _channels_first(values) if is_pictures else values
    if values.dtype != np.uint8 or not is_pictures:
        stays_whole = values.dtype.kind in "iu" and form.inputs_are is None and not form.mean
        kind = np.int64 if stays_whole else np.float32
        stored = torch.from_numpy(pixels.astype(kind, order="C"))
        return apply_form(Dataset(name, stored, targets, classes, size, authors, scaling=AS_STORED.name), form)
    mean, std = zip(*(_statistics(pixels[:, channel]) for channel in range(pixels.shape[1])), strict=True)
    facts: dict[str, Any] = {"mean": mean, "std": std, "scaling": f"pixels {POOL}"}
    return apply_form(Dataset(name, normalise_bytes(pixels, mean, std), targets, classes, size, authors, **facts), form)


def count_classes(name: str, labels: Tensor, stated: int | None = None) -> int:
    """Return the number of classes, by the labels if it is not stated; refuse labels that do not start at 0."""
    if not len(labels):
        return 0
    low, high = int(labels.min()), int(labels.max())
    if stated is not None:
        return stated
    if low > 0:
        advice = f"subtract {low} from each (labels - {low}), or set classes if no row has the label 0"
        raise WrongInput("labels", f"{name} has labels from {low} to {high}; they must start at 0: {advice}")
    if high >= len(labels) or low < 0:
        raise WrongInput("labels", f"{name} has labels from {low} to {high} in {len(labels)} rows; number them from 0")
    return high + 1


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
