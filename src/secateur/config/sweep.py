"""Run file of `secateur sweep`: jobs, and the fields whose product defines their pieces of work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from secateur.catalogue import find
from secateur.config import base
from secateur.config.base import Fields, field, flag
from secateur.config.messages import Allowed, explain
from secateur.errors import WrongInput

CASES = "must be a list of fields with values, such as [{sparsity: .5}]"
GRID = "must be a list of values for every field, such as {sparsity: [.5, .7]}"
NAMES = "must have names of letters, digits, dots and dashes"
Cases = Annotated[list[dict[str, Any]], Field(min_length=1), Allowed(CASES)]
Grid = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1), Allowed(GRID)]
Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


class Reproduce(Fields):
    """`secateur reproduce` as a run file; fields that are None take the scale's values."""

    study: str
    scale: Literal["tiny", "small", "full"] = flag("small", "tiny, small, or full: the paper's setting.")
    data: str | None = flag(None, base.DATA)
    data_folder: Path | None = flag(None, base.DATA_FOLDER)
    model: str | None = flag(None, base.MODEL)
    seeds: base.Seeds | None = flag(None, base.NUMBER_OF_SEEDS)
    device: str | None = flag(None, f"{base.DEVICES}.")
    images: bool | None = flag(None, base.IMAGES)
    set_: dict[str, Any] = Field({}, alias="set", description="Any field of the study.")

    @property
    def options(self) -> dict[str, Any]:
        """The fields that replace the scale's values."""
        return self.model_dump(exclude={"study", "scale", "set_"})

    @model_validator(mode="after")
    def _check(self) -> Reproduce:
        find("study", self.study)
        return self


class Work(Fields):
    """Job of a sweep; all other fields are those of the job's run file, the same in every piece."""

    model_config = ConfigDict(extra="allow")

    job: Literal["audit", "invert", "federate", "reproduce"]
    cases: Cases = field([{}], "Sets of fields; every set makes pieces of its own.")
    grid: Grid | None = field(None, "Values of fields; every combination makes a piece.")
    seeds: base.Seeds | None = field(None, "Seeds; every seed makes a piece.")
    cpus: base.Positive = field(1, "CPUs of a piece.")
    gpus: base.NotNegative = field(0, "GPUs of a piece; shares such as .25 are possible.")

    @property
    def common(self) -> dict[str, Any]:
        """The fields of every piece."""
        return self.model_extra or {}


class Sweep(Fields):
    """`secateur sweep`: one job, or several by name; fields beside `jobs` are defaults of every job."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    jobs: Annotated[dict[Name, Work], Allowed(NAMES)]

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        fields = dict(values)
        schema = {name: fields.pop(name) for name in ("schema",) if name in fields}
        if "jobs" not in fields:
            work = _work(fields, "")
            return schema | {"jobs": {work.job: work}}
        jobs = fields.pop("jobs")
        if not isinstance(jobs, Mapping) or not all(isinstance(job, Mapping | Work) for job in jobs.values()):
            raise WrongInput("jobs", "is not readable; write name: {job: ..., fields}")
        if not jobs:
            raise WrongInput("jobs", "must name at least one job")
        return schema | {"jobs": {name: _work({**fields, **dict(job)}, f"jobs.{name}") for name, job in jobs.items()}}


def _work(fields: Mapping[str, Any], prefix: str) -> Work:
    try:
        return Work.model_validate(fields)
    except ValidationError as error:
        raise explain(error, prefix, Work) from None
