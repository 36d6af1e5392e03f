"""Limits on leakage, in a run file or in a policy file of `secateur gate`."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import Field

from secateur.config.base import Fields, NotNegative, field

Limit = Annotated[float, Field(ge=0, le=1)] | None
Unit = Literal["example", "client"]


class Limits(Fields):
    """Upper limits on pruned and defended models, under every attack; None: no limit."""

    auc: Limit = None
    attack_accuracy: Limit = None
    balanced_accuracy: Limit = None
    advantage: Annotated[float, Field(ge=-1, le=1)] | None = None
    tpr_at_fpr_10: Limit = Field(None, alias="tpr_at_fpr_0.1")
    tpr_at_fpr_1: Limit = Field(None, alias="tpr_at_fpr_0.01")
    tpr_at_fpr_01: Limit = Field(None, alias="tpr_at_fpr_0.001")
    worst_group_auc: Limit = None
    worst_group_tpr: Limit = Field(None, alias="worst_group_tpr_at_fpr_0.01")
    accuracy_drop: Limit = None
    recognisable: Limit = field(None, "Share of pictures that an attack makes recognisable.")
    psnr: float | None = None
    label_accuracy: Limit = None
    epsilon: NotNegative | None = field(None, "Epsilon that the defense proves.")
    decide: Literal["high", "value", "low"] = field("high", "End of the interval that is held against a limit.")
    attacker: Literal["shadows", "no-shadows"] = field("shadows", "The attacker that the limits are meant for.")

    def by_measure(self) -> dict[str, float]:
        """Return the limits that are set, by the name of the measure."""
        return self.model_dump(by_alias=True, exclude_none=True, exclude={"decide", "attacker"})


class PrivacyClaim(Fields):
    """The privacy that a model's maker claims for its whole training."""

    epsilon: NotNegative = field(..., "Claimed epsilon.")
    delta: Annotated[float, Field(ge=0, lt=1)] = field(0.0, "Claimed delta.")
    unit: Unit = field("example", "Whose presence is hidden: one example, or one client.")


class PolicyFile(Fields):
    """A policy of an organisation: its limits, who set them, and until when they hold."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str = "policy"
    set_by: str = ""
    set_on: date | None = None
    review_by: date | None = field(None, "After this day the policy decides nothing.")
    limits: Limits
    claim: PrivacyClaim | None = field(None, "Privacy that is claimed for the models as they were brought.")
