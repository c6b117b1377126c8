"""Keys that several kinds of reward share: the limits of reward workers, and what is read of a text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.tables.section import Seconds, Section


class RewardLimits(Section):
    timeout_s: Seconds = 10.0
    """Deadline of one scoring call. After the deadline the worker is killed, and the trajectory fails."""
    memory_mb: int = Field(default=2048, ge=64, le=2**24)
    """Memory that a reward worker may use, beyond its memory after the start and the imports."""
    prove_references: bool = True
    """Before a run, the reference answers of the first rows are scored, and the run is refused if one has not
    full marks. False: the run begins all the same."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Number of reward processes."""
    workers_max: int | None = Field(default=None, ge=1, le=1024)
    """Most reward processes: with a long queue there are more than `workers`. `"none"`: `workers`, always."""

    @property
    def most_workers(self) -> int:
        return max(self.workers, self.workers_max or 0)

    @property
    def limits(self) -> dict[str, Any]:
        """The keys of this table, without those of the kind."""
        return {key: value for key, value in self if key in RewardLimits.model_fields}

    @property
    def changed_limits(self) -> list[str]:
        """The limits that are not at the default of the kind."""
        fields = type(self).model_fields
        return [key for key, value in self.limits.items() if value != fields[key].default]


_EXTRACT = """Regular expression with one group that finds the answer in the completion. `"none"`: the answer
is the whole completion."""
_EXTRACT_ANSWER = """Regular expression with one group that finds the reference in the answer column. GSM8K:
`#### (.+)`. `"none"`: the reference is the whole column."""
_ANSWER_IS = """What the answer column holds. `"one"`: one text, number, truth value or date; a list or a
table is refused. `"any"`: a list of answers, each of which is right. `"json"`, of `exact` alone: any value,
and the completion is the same value as JSON."""
AnswerIs = Annotated[Literal["one", "any", "json"], Field(description=_ANSWER_IS)]
Extract = Annotated[str | None, Field(description=_EXTRACT)]
ExtractAnswer = Annotated[str | None, Field(description=_EXTRACT_ANSWER)]
