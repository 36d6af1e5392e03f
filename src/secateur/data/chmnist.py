"""CHMNIST: tissue images in class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from secateur.catalogue import method
from secateur.data.archives import contents
from secateur.data.dataset import Dataset, dataset_of_pixels
from secateur.data.fetch import PublicFile, fetch, md5_of
from secateur.data.load import read_image
from secateur.errors import WrongInput

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # SAMIA's values, equal to ImageNet's
TILES = "Kather_texture_2016_image_tiles_5000"
ADDRESS = f"https://zenodo.org/records/53169/files/{TILES}.zip"
SOURCE = PublicFile(f"{TILES}.zip", ADDRESS, "0ddbebfc56344752028fda72602aaade")
CLASSES = ("01_TUMOR", "02_STROMA", "03_COMPLEX", "04_LYMPHO", "05_DEBRIS", "06_MUCOSA", "07_ADIPOSE", "08_EMPTY")


@method("dataset", "chmnist", "samia_ppb", classes=8, input_shape=(3, 32, 32), source=SOURCE.address)
def chmnist(folder: Path | None = None, download: bool = True) -> Dataset:
    """5000 images of colorectal tissue in 8 classes, resized to 32 x 32 pixels (Kather et al. 2016).

    Reads Kather_texture_2016_image_tiles_5000 as a zip or a folder, in `folder` or in its subfolder chmnist. The paper
    prints 10 classes; the data have 8.
    """
    path = fetch(SOURCE, folder, download, [TILES, f"chmnist/{TILES}.zip", f"chmnist/{TILES}"])
    images: list[tuple[str, int, np.ndarray]] = []
    for member, stream in contents(path):
        if member.suffix.lower() == ".tif" and not member.name.startswith("."):
            if member.parent.name not in CLASSES:
                raise WrongInput("data", f"{path} holds {member} outside the class folders {', '.join(CLASSES)}")
            pixels = read_image(stream, f"{path}/{member}", size=(32, 32))
            images.append((member.name, CLASSES.index(member.parent.name), pixels))
    if not images:
        raise WrongInput("data", f"{path} holds no .tif image in the class folders {', '.join(CLASSES)}")
    images.sort(key=lambda image: (image[1], image[0]))  # the same order from the zip and from the folder
    pixels, labels = np.stack([pixels for _, _, pixels in images]), np.array([label for _, label, _ in images])
    verified = md5_of(path) == SOURCE.md5 if path.is_file() else None
    return dataset_of_pixels("chmnist", pixels, labels, 8, len(images), MEAN, STD, verified=verified)
