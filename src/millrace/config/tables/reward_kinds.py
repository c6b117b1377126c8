"""`[reward]`: rewards that ask or check without a function of the user's own, the limits of reward workers,
what is read of a text, and `[reward.agent]`, an agent as a program of its own.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from millrace.config.tables.section import Count, Seconds, Section


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


# ---------------------------------------------------------------- kinds of rewards


def _without_secrets(url: str) -> str:
    """Raises: ValueError: no URL of HTTP, or one that a record of the run must not have."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("http", "https") or not rest.strip("/"):
        raise ValueError(f"`reward.url` ({url!r}) must begin with http:// or https://, and name a host")
    if "@" in rest.partition("/")[0] or "?" in rest:
        raise ValueError(
            "`reward.url` has a user, a password or a query, and a run records its URL.\n"
            "  Put the key into a variable of the environment, and name that as `reward.api_key_env`"
        )
    return url.rstrip("/")


def _variable(name: str) -> str:
    """Raises: ValueError: no name of a variable. The error does not repeat what may be the key itself."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            "`reward.api_key_env` must be the name of a variable of the environment, in capitals.\n"
            '  Export the key as JUDGE_API_KEY, and write api_key_env = "JUDGE_API_KEY"'
        )
    return name


class JudgeRewardSection(RewardLimits):
    kind: Literal["judge"] = "judge"
    """A language model behind an OpenAI-compatible server grades the completion."""
    url: Annotated[str, AfterValidator(_without_secrets)]
    """What stands before `/chat/completions`, for example `http://localhost:8000/v1`."""
    model: str
    """The judge's name on the server."""
    mode: Literal["scalar", "pairwise"] = "scalar"
    """`"scalar"`: a score of the completion, scaled to 0 to 1. `"pairwise"`: the completion against the row's
    reference answer, in both orders: 1 wins, 0.5 ties, 0 loses, and the reward is the mean of the two."""
    rubric: str | None = None
    """What the judge grades by. `"none"`: `rubric_column` names it."""
    rubric_column: str | None = None
    """Column with the rubric of the row."""
    show_answer: bool = False
    """Show the reference answer to a judge that scores. A pairwise judge always sees it."""
    score_min: float = 1.0
    """Score that gives the reward 0."""
    score_max: float = 10.0
    """Score that gives the reward 1."""
    api_key_env: Annotated[str, AfterValidator(_variable)] | None = None
    """Variable of the environment with the API key. The key itself is neither stored nor printed."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of the judge."""
    max_tokens: Count = 512
    """Most tokens of one answer of the judge."""
    concurrency: int = Field(default=16, ge=1, le=4096)
    """Most requests at the same time, of all reward workers together. A worker has at most 16."""
    requests_per_s: float | None = Field(default=None, gt=0, le=1e6)
    """Most requests a second, of all reward workers together. `"none"`: no limit."""
    request_timeout_s: Seconds = 60.0
    """Deadline of one request. `timeout_s` is that of the whole score, with retries and waits."""
    attempts: int = Field(default=4, ge=1, le=100)
    """Requests for one judgement, before its trajectory fails."""
    backoff_s: Seconds = 1.0
    """Mean pause before the second attempt. It doubles with each attempt, up to 60 s."""
    asked_twice: float = Field(default=0.02, ge=0, le=1)
    """Share of completions that the judge grades a second time, to measure its agreement with itself."""
    timeout_s: Seconds = 300.0
    """Deadline of one score, with its retries and waits. After the deadline the trajectory fails."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.rubric is None) == (self.rubric_column is None):
            raise ValueError("a judge needs one of `reward.rubric` and `reward.rubric_column`, and not both")
        if self.rubric is not None and not self.rubric.strip():
            raise ValueError("`reward.rubric` is empty: say what a good completion is")
        if self.score_min >= self.score_max:
            raise ValueError(
                f"`reward.score_min` ({self.score_min:g}) must be less than `reward.score_max` "
                f"({self.score_max:g})"
            )
        if self.concurrency < self.most_workers:
            raise ValueError(
                f"`reward.concurrency` ({self.concurrency}) must be at least the number of reward workers "
                f"({self.most_workers}): each has one request at a time"
            )
        return self


class JsonRewardSection(RewardLimits):
    kind: Literal["json"] = "json"
    """The completion is JSON, and matches a JSON Schema."""
    json_schema: str | None = None
    """The schema, as JSON text. `"none"`: that of `schema_column`; without that too, any JSON will do."""
    schema_column: str | None = None
    """Column with the schema of the row, as a table or JSON text."""
    partial: float = Field(default=0.0, ge=0, lt=1)
    """Reward of JSON that parses, but does not match."""
    extract: Extract = None

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if self.json_schema is not None and self.schema_column is not None:
            raise ValueError("`reward.json_schema` and `reward.schema_column` are two schemas: leave one out")
        return self


class PatternRewardSection(RewardLimits):
    kind: Literal["pattern"] = "pattern"
    """A regular expression matches the whole completion."""
    pattern: str | None = None
    """The regular expression, of Python's `re`. `"none"`: that of `pattern_column`."""
    pattern_column: str | None = None
    """Column with the regular expression of the row."""

    @model_validator(mode="after")
    def _one_pattern(self) -> Self:
        if (self.pattern is None) == (self.pattern_column is None):
            raise ValueError("one of `reward.pattern` and `reward.pattern_column` is needed, and not both")
        return self


# ---------------------------------------------------------------- agent


class AgentSection(Section):
    command: tuple[str, ...] = ()
    """The program and its arguments. `{column}` becomes that column of the row. `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` say where it asks for turns."""
    function: str | None = None
    """In place of a command: `package.module:name` or `file.py:name`, a function
    `def solve(row, base_url, key)`. It runs in a process of its own. `"none"`: there is a command."""
    variables: dict[str, str] = Field(default={})
    """More environment variables of the agent."""
    task_directory: str | None = None
    """The column with a task directory in Harbor's form: `instruction.md`, files, and `tests/test.sh`. The
    agent gets the files, and the instruction as the column `instruction`. `"none"`: there is none."""
    recovery: Literal["replayed", "failed"] = "replayed"
    """What follows if the process of an episode is lost. `"replayed"`: a new agent gets the recorded turns.
    If it asks something else, the trajectory begins again. `"failed"`: the trajectory fails."""
    end_s: Seconds = 2.0
    """How long an agent may run on after a budget has ended its episode. Then it is killed. This time is a
    part of `reward.timeout_s`. The rest of that is the deadline from one request to the next."""
    memory_mb: Count = 2048
    """Memory of one agent."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.command) == (self.function is not None):
            raise ValueError("`reward.agent` needs either `command` or `function`")
        return self
