"""What every part of a configuration is made of: its base class, and numbers within limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _usable_temperature(value: float) -> float:
    # Logits divided by less, or multiplied by more, lose all meaning in fp32.
    if value and not 1e-4 <= value <= 1e4:
        raise ValueError(f"given {value!r}, expected 0 (greedy) or a number from 0.0001 to 10000")
    return value


Temperature = Annotated[float, AfterValidator(_usable_temperature)]


class Section(BaseModel):
    """A frozen part of the configuration without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
