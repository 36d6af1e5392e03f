"""The one door to data: a known name, or the user's own."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from secateur.catalogue import methods
from secateur.data.dataset import Dataset
from secateur.data.own import from_function, from_image_folder, from_npz
from secateur.errors import WrongInput, unknown


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
