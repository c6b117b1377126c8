"""The base of every table of a configuration: a frozen section, and numbers with a range.

Every number is finite. With a number outside its range, a run would learn nothing, unlearn, or never begin.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


NAME = r"^[a-z0-9][a-z0-9_-]{0,39}$"
"""A name that the user gives a table of a list."""
COUNT_MAX = 2**31 - 1
"""The largest count, which numpy, torch and SQLite can represent."""
SECONDS_MAX = 30 * 86_400.0
"""The longest deadline or interval: a month."""

Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
CountOrZero = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _device(name: str) -> str:
    """Raises: ValueError: the name is none of the four forms."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name):
        return name
    near = difflib.get_close_matches(name.lower(), ("cpu", "cuda", "auto"))
    if name and (gpu := re.fullmatch(r"(cuda|gpu|nvidia)?[:_ ]?(\d{1,4})?", name.lower())):
        near = [f"cuda:{gpu[2]}" if gpu[2] else "cuda"]
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"`model.device` ({name!r}) is not known.\n"
        f"  {hint}It is `cpu`, `cuda`, `cuda:N` (GPU number N alone, from 0) or `auto`"
    )


Device = Annotated[str, AfterValidator(_device)]
"""A device of torch, for the key `model.device`."""
