"""What every run file may set."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from secateur.config.fields import Fields
from secateur.training import Recipe

DEVICES = "auto, cpu, cuda or cuda:NUMBER"


class Training(Fields):
    """How a model is trained; what isn't given is the paper's (samia_ppb 5.1)."""

    epochs: Annotated[int, Field(ge=1)] = 100
    batch_size: Annotated[int, Field(ge=1)] = 128
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    patience: Annotated[int, Field(ge=1)] | None = 5

    def over(self, base: Recipe) -> Recipe:
        """The base recipe with what was given laid over it."""
        return dataclasses.replace(base, **{name: getattr(self, name) for name in self.model_fields_set})


class Common(Fields):
    """What every run file may set."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    model: str = "digits-cnn"  # a name of ours, or module:function
    weights: Path | None = None  # .safetensors of a trained model
    data: str = "digits"  # a name, an .npz, an image folder, or module:function
    data_folder: Path | None = None  # where the data set's files are; else SECATEUR_DATA, else the cache
    download: bool = True
    examples: Annotated[int, Field(ge=1)] | None = None  # at most so many rows of the data set, drawn at random
    train: Training = Training()
    finetune: Training = Training()
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description=DEVICES)] = "auto"
    threads: Annotated[int, Field(ge=1)] = 1  # results are equal bit for bit only at one thread count
    way: Literal["auto", "sequential", "stacked", "ray"] = "auto"

    def recipes(self, tabular: bool) -> tuple[Recipe, Recipe]:
        """Training and fine-tuning: at most 100 epochs for images, 50 for tables, and half of that (samia_ppb 5.1)."""
        train = self.train.over(Recipe(epochs=50 if tabular else 100))
        return train, self.finetune.over(dataclasses.replace(train, epochs=max(1, train.epochs // 2)))
