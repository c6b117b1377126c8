"""What every table of a configuration is made of: a frozen section, and numbers with a range.

Every number is finite. Outside its range a run would learn nothing, unlearn, or never begin.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


COUNT_MAX = 2**31 - 1
"""Of whatever is counted: what numpy, torch and SQLite all hold."""
SECONDS_MAX = 30 * 86_400.0
"""Of a deadline or an interval: a month."""

Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
CountOrZero = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
