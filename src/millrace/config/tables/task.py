"""`[task]` and `[reward]`: where prompts come from, and what a completion is worth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from millrace.config.tables.section import Count, Seconds, Section, Seed

Arguments = Annotated[
    dict[str, bool | int | float | str],
    Field(
        description="Arguments of the tokenizer's chat template, for example `enable_thinking = false`. A "
        "template ignores those that it does not know."
    ),
]


class GymTaskSection(Section):
    kind: Literal["gym"] = "gym"
    name: str
    """A reasoning-gym data set, for example `chain_sum`."""
    options: dict[str, int | float | str | bool | list[str] | list[int]] = Field(default={})
    """Keywords for `reasoning_gym.create_dataset`."""
    size: Count = 100_000
    """Number of distinct rows. A row is generated when it is needed."""
    data_seed: Seed = 1
    """Seed of the rows. Held-out evaluation uses a different seed."""
    template: str = "{question}\n"
    """Prompt text."""
    chat: bool = False
    """Render `template` as a user message through the tokenizer's chat template."""
    chat_arguments: Arguments = Field(default={})


class RowsSection(Section):
    """A user's own rows, and their columns."""

    path: str
    prompt: str = "prompt"
    """The column with the prompt: a string or a list of chat messages. `a.b` is the key `b` of column `a`."""
    answer: str | None = "answer"
    """The column with the reference answer, for example `reward_model.ground_truth`. `"none"`: no column."""
    template: str = "{prompt}"
    """Prompt text from the row's columns. Chat messages have no need of one."""
    chat: bool = False
    """Render `template` as a user message through the tokenizer's chat template. A list of chat messages is
    rendered without this key."""
    chat_arguments: Arguments = Field(default={})


class FileTaskSection(RowsSection):
    kind: Literal["file"] = "file"
    path: str
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a data set directory."""


class FunctionTaskSection(RowsSection):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a function without arguments. The function returns a sequence
    of rows (dicts), the same rows at every call. See examples/environment.py."""


Task = Annotated[GymTaskSection | FileTaskSection | FunctionTaskSection, Field(discriminator="kind")]


class RewardLimits(Section):
    timeout_s: Seconds = 10.0
    """Deadline of one scoring call. After the deadline the worker is killed, and the trajectory fails."""
    memory_mb: int = Field(default=2048, ge=64, le=2**24)
    """Memory that a reward worker may use, beyond its memory after the start and the imports."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Number of reward processes."""
    workers_max: int | None = Field(default=None, ge=1, le=1024)
    """Most reward processes: with a long queue there are more than `workers`. `"none"`: `workers`, always."""

    @property
    def most_workers(self) -> int:
        return max(self.workers, self.workers_max or 0)


_EXTRACT = """Regular expression with one group that finds the answer in the completion. `"none"`: the answer
is the whole completion."""
_EXTRACT_ANSWER = """Regular expression with one group that finds the reference in the answer column. GSM8K:
`#### (.+)`. `"none"`: the reference is the whole column."""
Extract = Annotated[str | None, Field(description=_EXTRACT)]
ExtractAnswer = Annotated[str | None, Field(description=_EXTRACT_ANSWER)]


class GymRewardSection(RewardLimits):
    kind: Literal["gym"] = "gym"
    """The scorer of the gym task's own data set."""
    extract: Extract = None
    threshold: float = Field(default=0.5, ge=0, le=1)
    """A score below the threshold becomes 0, because some scorers give small credit for anything."""


class MathRewardSection(RewardLimits):
    kind: Literal["math"] = "math"
    """math-verify compares the completion with the answer column."""
    extract_answer: ExtractAnswer = None


class ExactRewardSection(RewardLimits):
    kind: Literal["exact"] = "exact"
    extract: Extract = None
    extract_answer: ExtractAnswer = None


class FunctionRewardSection(RewardLimits):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: `def reward(completion, answer, **columns)`."""


Reward = Annotated[
    GymRewardSection | MathRewardSection | ExactRewardSection | FunctionRewardSection,
    Field(discriminator="kind"),
]
