"""What every section of the configuration is, and the numbers that they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]
PerSecond = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
