"""`[task]`, `[reward]` and `[selection]`: where prompts come from, what a completion is worth, and which
rows rest, because the model always or never solves them. `task.kind = "mixture"`: several tasks, each
with a weight and, if it needs one, a reward of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from millrace.config.tables.reward_kinds import (
    AgentSection,
    AnswerIs,
    Extract,
    ExtractAnswer,
    JsonRewardSection,
    JudgeRewardSection,
    PatternRewardSection,
    RewardLimits,
)
from millrace.config.tables.section import NAME, Count, Seconds, Section, Seed

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
    """Number of rows. A row is generated when it is needed. Some families have far fewer distinct prompts:
    see reports/gym-families.md."""
    data_seed: Seed = 1
    """Seed of the rows. Held-out evaluation uses a different seed."""
    template: str = "{question}\n"
    """Prompt text."""
    chat: bool = False
    """Render `template` as a user message through the tokenizer's chat template."""
    system: str | None = None
    """The text of a system message before each chat prompt that has none."""
    chat_arguments: Arguments = Field(default={})


class RowsSection(Section):
    """Rows of a data set, and their columns."""

    prompt: str = "prompt"
    """The column with the prompt: a string or a list of chat messages. `a.b` is the key `b` of column `a`."""
    answer: str | None = "answer"
    """The column with the reference answer, for example `reward_model.ground_truth`. `"none"`: no column. Of
    chat messages it is the text of the last, which must be the assistant's."""
    template: str = "{prompt}"
    """Prompt text from the row's columns. Chat messages have no need of one."""
    chat: bool = False
    """Render `template` as a user message through the tokenizer's chat template. A list of chat messages is
    rendered without this key."""
    system: str | None = None
    """The text of a system message before each chat prompt that has none."""
    tools: str | None = "tools"
    """The column with the tools of a chat prompt: JSON Schemas, as a list or as text. `"none"`: no column."""
    chat_arguments: Arguments = Field(default={})


class FileTaskSection(RowsSection):
    kind: Literal["file"] = "file"
    path: str
    """A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a directory of such files, or a pattern such as
    `data/train-*.parquet`."""


class HubTaskSection(RowsSection):
    kind: Literal["hub"] = "hub"
    name: str = Field(pattern=r"^\w[\w.-]*/\w[\w.-]*$")
    """A data set of the Hugging Face hub, or of the mirror that `HF_ENDPOINT` names: `owner/name`."""
    subset: str | None = None
    """The configuration of the data set, for example `main` of `openai/gsm8k`."""
    split: str = "train"
    """The split, for example `test` for an evaluation."""
    revision: str | None = None
    """A branch, a tag or a commit. Rows that were fetched once are not fetched again."""
    rows_max: Count | None = None
    """The first rows alone, streamed. `"none"`: all rows."""


class FunctionTaskSection(RowsSection):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a function without arguments. The function returns a sequence
    of rows (dicts), the same rows at every call. See examples/environment.py."""


Task = Annotated[
    GymTaskSection | FileTaskSection | HubTaskSection | FunctionTaskSection, Field(discriminator="kind")
]


class GymRewardSection(RewardLimits):
    kind: Literal["gym"] = "gym"
    """The scorer of the gym task's own data set."""
    extract: Extract = None
    threshold: float = Field(default=0.5, ge=0, le=1)
    """A score below the threshold becomes 0, because some scorers give small credit for anything."""


class MathRewardSection(RewardLimits):
    kind: Literal["math"] = "math"
    """The final answer of the completion is the answer column, as mathematics. See docs/rewards.md."""
    extract_answer: ExtractAnswer = None
    answer_is: AnswerIs = "one"

    @model_validator(mode="after")
    def _compared_as_mathematics(self) -> Self:
        if self.answer_is == "json":
            raise ValueError('`reward.answer_is` "json" is for `reward.kind` "exact"')
        return self


class ExactRewardSection(RewardLimits):
    kind: Literal["exact"] = "exact"
    extract: Extract = None
    extract_answer: ExtractAnswer = None
    answer_is: AnswerIs = "one"
    compare: Literal["text", "words", "f1"] = "text"
    """`"text"`: 1 for the same text. `"words"`: 1 for the same words, without capitals, articles and
    punctuation around words, as the exact match of SQuAD and Search-R1. `"f1"`: the F1 of the words, from 0
    to 1. Of several answers the best counts."""

    @model_validator(mode="after")
    def _json_is_compared_as_json(self) -> Self:
        if self.answer_is == "json" and self.compare != "text":
            raise ValueError(
                f'`reward.compare` ("{self.compare}") compares words, and `reward.answer_is` ("json") '
                "compares values: leave one of them out"
            )
        return self


class CodeRewardSection(RewardLimits):
    kind: Literal["code"] = "code"
    """The program in the completion runs in a sandbox, and tests of the row judge what it gives."""
    tests: str = "tests"
    """Column with the tests: `{"inputs": [...], "outputs": [...], "fn_name": "f"}`, as a table or text; or
    Python: a list of asserts, or a text that defines `check(candidate)`."""
    function: str | None = None
    """The function that the tests call. `"none"`: `fn_name` of the tests; without that too, the program reads
    each input as text, and prints the output. Of asserts: `entry_point` of the row, or the one that they
    call."""
    score: Literal["all", "share"] = "all"
    """`"all"`: 1 if every test passes, else 0. `"share"`: the share of the tests that pass."""
    isolation: Literal["namespaces", "landlock", "limits"] = "landlock"
    """The weakest sandbox that will do. `"limits"` is no isolation: programs may read, write and send what
    the reward worker may."""
    program_cpu_s: float = Field(default=5.0, ge=1, le=3600)
    """Processor time of one program, for all tests of its row. Its time on the clock is 0.8 `timeout_s`."""
    program_memory_mb: int = Field(default=512, ge=64, le=2**20)
    """Memory of one program."""


class FunctionRewardSection(RewardLimits):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: `def reward(completion, answer, **columns)`."""
    signature: Literal["millrace", "trl", "verl"] = "millrace"
    """What the function is called with: as above, as TRL's `reward(prompts, completions, **columns)`, or as
    verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`."""
    attempts: int = Field(default=1, ge=1, le=100)
    """Calls for one score, before it has failed. All are within `timeout_s`."""
    backoff_s: Seconds = 1.0
    """Mean pause before the second attempt. It doubles with each attempt, up to 60 s."""


class EnvironmentRewardSection(RewardLimits):
    kind: Literal["environment"] = "environment"
    """An environment answers each turn of the model, and rewards the episode."""
    path: str
    """`package.module:name` or `file.py:name`: a class with `reset(row)` and `step(action)`, of
    tools, or of SkyRL-Gym. See docs/turns.md. With an agent: `def reward(end, **columns)`."""
    agent: AgentSection | None = None
    """A program that asks for turns by HTTP, in place of a class. See docs/agents.md. `"none"`: a class."""
    turns: Count = 8
    """Most turns of an episode. `sampling.max_tokens` bounds the tokens of one turn, and
    `rollout.max_sequence_tokens` all tokens."""
    tool_calls: Count | None = None
    """Most tool calls of an episode, with those that are wrong. The next call ends the episode. `"none"`: no
    limit of its own."""
    episode_tokens: Count | None = None
    """Most tokens that the model samples in an episode, in all turns. `"none"`: no limit of its own."""
    episode_s: Seconds | None = None
    """Most seconds of an episode that its environment takes for answers. No answer is cut: the episode ends
    after the answer that reaches them. `"none"`: no limit."""
    snapshot_bytes: Count = 2**20
    """Most bytes of a snapshot of an environment that is restored after a crash."""
    group_wait_s: Seconds | None = None
    """Seconds after the start of a group from which on none of its trajectories waits for the environment:
    one that has to wait fails. `"none"`: only `timeout_s` ends a wait."""
    role: str = "user"
    """The role of an observation that is a text, in a chat template."""
    result_characters: Count = 16_384
    """Most characters of the result of a tool. The rest is cut, and a note says so."""

    @model_validator(mode="after")
    def _in_time(self) -> Self:
        if self.agent is not None and self.agent.end_s > self.timeout_s / 2:
            raise ValueError("`reward.agent.end_s` is more than half of `reward.timeout_s`")
        return self


OneReward = (
    GymRewardSection
    | MathRewardSection
    | ExactRewardSection
    | CodeRewardSection
    | JsonRewardSection
    | PatternRewardSection
    | JudgeRewardSection
    | FunctionRewardSection
    | EnvironmentRewardSection
)
OF_THE_SUM = ("reward", "turn_")
"""Beginnings of metrics that mean something else than a member of a sum."""


class RewardMember(Section):
    name: str = Field(pattern=NAME)
    """What it is called in metrics and failures. Small letters, digits, `-` and `_`."""
    weight: float = 1.0
    """What its value is multiplied by. Negative: a penalty."""
    leave_out: Literal["never", "abstained", "failed"] = "never"
    """`"abstained"`: where the member has no opinion, the sum is that of the others. `"failed"`: also where
    it fails. Each is a metric. `"never"`: the sum abstains or fails with it."""
    reward: OneReward = Field(discriminator="kind")
    """As `[reward]`, without limits: those of the sum hold."""


class SumRewardSection(RewardLimits):
    kind: Literal["sum"] = "sum"
    """The sum of several rewards, each with a name, a weight and a metric of its own."""
    members: tuple[RewardMember, ...] = Field(min_length=1)
    """`reward.members` is a list of tables, each headed `[[reward.members]]`. If one of the rewards fails or
    abstains, the sum does, unless the member says otherwise."""
    timeout_s: Seconds = 60.0
    """Deadline of one score, by all members, one after the other."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [member.name for member in self.members]
        for member in self.members:
            which = f"`reward.members` ({member.name})"
            if names.count(member.name) > 1 or member.name.startswith(OF_THE_SUM):
                raise ValueError(f"{which}: the name is taken: give each member its own")
            if member.weight == 0:
                raise ValueError(f"{which}: `weight` is 0: leave the member out")
            for key in member.reward.changed_limits:
                raise ValueError(f"{which}: `{key}` is a limit of the whole sum: set `reward.{key}`")
            judge = member.reward if isinstance(member.reward, JudgeRewardSection) else None
            if judge is not None and judge.concurrency < self.most_workers:
                raise ValueError(
                    f"{which}: `concurrency` is less than the number of reward workers ({self.most_workers})"
                )
        return self


AnyReward = OneReward | SumRewardSection
Reward = Annotated[AnyReward, Field(discriminator="kind")]


def members_of(reward: AnyReward) -> dict[str, OneReward]:
    """The members of a sum by name; any other reward alone, with an empty name."""
    if isinstance(reward, SumRewardSection):
        return {member.name: member.reward for member in reward.members}
    return {"": reward}


# ---------------------------------------------------------------- mixture


BLOCK = 1000
"""Groups of the stream in which the shares of the parts are exact, to whole groups."""


class MixturePart(Section):
    name: str = Field(pattern=NAME)
    """What it is called in rows and metrics. Small letters, digits, `-` and `_`."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the prompts is `weight` over the sum of the weights."""
    task: Task
    """As `[task]`: where its prompts come from."""
    reward: AnyReward | None = Field(default=None, discriminator="kind")
    """As `[reward]`, without limits: those of `[reward]` hold. `"none"`: it is `[reward]`."""


class MixtureTaskSection(Section):
    kind: Literal["mixture"] = "mixture"
    """Several tasks in one stream of prompts, each with its weight."""
    parts: tuple[MixturePart, ...] = Field(min_length=1)
    """`task.parts` is a list of tables, each headed `[[task.parts]]`. See docs/data.md."""
    correct_at: float = Field(default=1.0, ge=-1e6, le=1e6)
    """A reward of at least this counts as correct in the metric NAME/pass_rate of a part."""

    @property
    def quotas(self) -> tuple[int, ...]:
        """Groups of each part in a block, by the method of the largest remainder. Their sum is `BLOCK`."""
        total = sum(part.weight for part in self.parts)
        due = [BLOCK * part.weight / total for part in self.parts]
        quotas = [int(one) for one in due]
        by_remainder = sorted(range(len(due)), key=lambda i: quotas[i] - due[i])
        for index in by_remainder[: BLOCK - sum(quotas)]:
            quotas[index] += 1
        return tuple(quotas)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [part.name for part in self.parts]
        for part, quota in zip(self.parts, self.quotas, strict=True):
            which = f"`task.parts` ({part.name})"
            if names.count(part.name) > 1:
                raise ValueError(f"{which}: it is the name of two: give each its own")
            if not quota:
                raise ValueError(
                    f"{which}: `weight` ({part.weight:g}) is less than one prompt in {BLOCK}: raise it, or "
                    "leave the part out"
                )
            if part.reward is None:
                continue
            for key in part.reward.changed_limits:
                raise ValueError(f"{which}: `{key}` is a limit of all parts: set `reward.{key}`")
        return self


# ---------------------------------------------------------------- selection


class SelectionSection(Section):
    retry: float = Field(default=0.1, ge=0.01, le=1)
    """Least probability with which a prompt of the stream is taken. So a row that rests is tried again."""
    correct_at: float = Field(default=1.0, ge=-1e6, le=1e6)
    """A reward of at least this is correct."""


class RestSelection(SelectionSection):
    kind: Literal["rest"] = "rest"
    """A row rests while its last `groups` groups were all solved, or all hopeless: the rewards within a group
    are equal, and at least `correct_at` (solved) or less (hopeless)."""
    groups: Count = 2
    """Groups in a row that must be solved before the row rests, or hopeless."""


class SignalSelection(SelectionSection):
    kind: Literal["signal"] = "signal"
    """A row is taken with the probability 4 p (1 - p), where p is its pass rate: most often at p = 0.5."""
    discount: float = Field(default=0.5, ge=0, le=1)
    """Weight of a group of the row in p, relative to its next group. 0: only the last one counts."""


Selection = RestSelection | SignalSelection
