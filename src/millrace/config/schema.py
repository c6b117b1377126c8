"""A run's configuration. Frozen once loaded."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from millrace.config.goes_together import refuse
from millrace.config.keys import Keys


class Config(Keys):
    """A run, whose keys go together."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refuse(self)
        return self
