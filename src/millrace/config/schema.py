"""Every configuration key, with its meaning and default. Frozen once loaded.

Alternatives are tagged unions on `kind`. `None` means off. Derived numbers are properties. Every number is
finite and has a range: outside it a run would learn nothing, unlearn, or never begin.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


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
StopString = Annotated[str, Field(min_length=1)]


# ---------------------------------------------------------------- model and task


class Model(Section):
    path: str
    """A Hugging Face model directory: config, safetensors weights, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of published weights. The trainer's master weights are always float32. Products are computed in it, but
    in float32 on a CPU without instructions for bfloat16."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""
    recompute: bool = False
    """The trainer keeps only each layer's input, and computes the rest again for the gradient. This needs a
    fraction of the memory and a third more work, and gives the same gradient."""


class GymTask(Section):
    kind: Literal["gym"] = "gym"
    name: str
    """A reasoning-gym data set, for example `chain_sum`."""
    options: dict[str, int | float | str | bool | list[str] | list[int]] = {}
    """Passed to `reasoning_gym.create_dataset`."""
    size: Count = 100_000
    """How many distinct rows to generate (lazily)."""
    data_seed: Seed = 1
    """Held-out evaluation uses another seed."""
    template: str = "{question}\n"
    """Prompt text, unless `chat` is true."""
    chat: bool = False
    """Render `template` as a user message through the tokenizer's chat template."""


class FileTask(Section):
    kind: Literal["file"] = "file"
    path: str
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a data set directory."""
    prompt: str = "prompt"
    """The column with the prompt: a string, or a list of chat messages. Dots go into tables: `a.prompt`."""
    answer: str | None = "answer"
    """The column with the reference answer, as `reward_model.ground_truth`; None: there is none."""
    template: str = "{prompt}"
    """Prompt text from the row's columns, unless `chat` is true."""
    chat: bool = False
    """Render `template`, or the column's messages, through the tokenizer's chat template."""


class FunctionTask(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a function without arguments that returns a sequence of
    rows (dicts), the same at every call. See examples/environment.py."""
    prompt: str = "prompt"
    """As in `file`."""
    answer: str | None = "answer"
    """As in `file`."""
    template: str = "{prompt}"
    """As in `file`."""
    chat: bool = False
    """As in `file`."""


Task = Annotated[GymTask | FileTask | FunctionTask, Field(discriminator="kind")]


class RewardLimits(Section):
    timeout_s: Seconds = 10.0
    """One scoring call may take this long; then its worker is killed and the trajectory fails."""
    memory_mb: int = Field(default=2048, ge=64, le=2**24)
    """Memory a reward worker may use beyond what it starts with and what it imports."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Reward processes."""


class GymReward(RewardLimits):
    kind: Literal["gym"] = "gym"
    """The scorer of the gym task's own data set."""
    extract: str | None = None
    """Regular expression with one group that finds the answer in the completion; None: all of it."""
    threshold: float = Field(default=0.5, ge=0, le=1)
    """Scores below become 0: some scorers give small credit for anything."""


class MathReward(RewardLimits):
    kind: Literal["math"] = "math"
    """math-verify against the answer column."""
    extract_answer: str | None = None
    """Regular expression with one group that finds the reference in the answer column, as `#### (.+)` does in
    GSM8K; None: all of it."""


class ExactReward(RewardLimits):
    kind: Literal["exact"] = "exact"
    extract: str | None = None
    """As in `gym`."""
    extract_answer: str | None = None
    """As in `math`."""


class FunctionReward(RewardLimits):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: `def reward(completion, answer, **columns)`."""


Reward = Annotated[GymReward | MathReward | ExactReward | FunctionReward, Field(discriminator="kind")]

# ---------------------------------------------------------------- algorithm and optimizer


class BatchShape(Section):
    prompts: Count = 8
    """Groups per optimizer step."""
    group_size: int = Field(default=8, ge=2, le=COUNT_MAX)
    """Trajectories per group."""
    token_budget: int = Field(default=8192, ge=64, le=COUNT_MAX)
    """Tokens per packed micro-batch in the trainer; changes speed and memory, never a gradient."""


class SamplingConfig(Section):
    max_tokens: Count = 128
    """Longest completion; one that reaches it is truncated."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """0.01 to 100 in training; 0, the most probable token, in evaluation only."""
    top_p: float = Field(default=1.0, ge=0.01, le=1)
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: CountOrZero = 0
    """Sample from this many most probable tokens, 2 or more in training; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens at least this probable, as a fraction of the most probable one's; 0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Divides positive logits of tokens in the prompt or completion, multiplies negative ones; 1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken from the logit of every token in the completion."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """As `presence_penalty`, times how often it is there."""
    stop: tuple[StopString, ...] = ()
    """Stop strings, beside the tokenizer's end-of-sequence token."""
    stop_token_ids: tuple[CountOrZero, ...] = ()
    """More tokens that end a completion."""
    ignore_eos: bool = False
    """The end-of-sequence token ends nothing; `stop`, `stop_token_ids` and `max_tokens` do."""
    allowed_token_ids: tuple[CountOrZero, ...] | None = Field(default=None, min_length=2)
    """Only these are sampled; None: all."""
    banned_token_ids: tuple[CountOrZero, ...] = ()
    """These are never sampled."""

    @model_validator(mode="after")
    def _something_is_left(self) -> SamplingConfig:
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise ValueError("`sampling.banned_token_ids` bans all of `sampling.allowed_token_ids`")
        return self


class GRPO(Section):
    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio current/proximal is clipped below at 1 - clip_low ..."""
    clip_high: float = Field(default=0.2, gt=0, le=100)
    """... and above at 1 + clip_high."""
    scale: Literal["std", "none"] = "std"
    """Divide centred rewards by the group's standard deviation, or not."""
    normalize: Literal["sequence", "token", "max_tokens"] = "token"
    """Mean per sequence then over sequences (GRPO), over all tokens (DAPO), or over the budget."""
    correction: float | None = Field(default=2.0, ge=1, le=1e6)
    """Cap of the truncated importance weight proximal/behavior (TIS), at least 1, the weight of a token
    that is not stale; None: no correction."""
    kl: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the KL penalty towards the reference (the initial model)."""


class DrGRPO(Section):
    kind: Literal["dr_grpo"] = "dr_grpo"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio current/proximal is clipped below at 1 - clip_low ..."""
    clip_high: float = Field(default=0.2, gt=0, le=100)
    """... and above at 1 + clip_high."""
    correction: float | None = Field(default=2.0, ge=1, le=1e6)
    """As in `grpo`."""


class AIPO(Section):
    kind: Literal["aipo"] = "aipo"
    rho: float = Field(default=4.0, ge=1, le=1e6)
    """Upper clip of the importance weight current/behavior; the paper's range is 2 to 10."""


class FunctionAlgorithm(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a `millrace.algorithms.Algorithm`. See
    examples/algorithm.py."""


Algorithm = Annotated[GRPO | DrGRPO | AIPO | FunctionAlgorithm, Field(discriminator="kind")]


class Optimizer(Section):
    lr: float = Field(default=1e-6, ge=0, le=1)
    """Learning rate after warm-up; constant. 0 trains nothing, which is of use for measurements only."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled, on every parameter."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises linearly."""
    grad_clip: float | None = Field(default=1.0, ge=1e-6, le=1e6)
    """Largest global gradient norm; None: no clipping."""


# ---------------------------------------------------------------- schedule


class Synchronous(Section):
    kind: Literal["synchronous"] = "synchronous"


class LlamaRL(Section):
    kind: Literal["llamarl"] = "llamarl"
    lag: CountOrZero = 1
    """Batches that generation may run ahead; also the staleness bound."""
    iteration_tokens: Count | None = None
    """Partial rollout: decode steps under one version before newer weights may be taken with
    trajectories in flight. None: derive max_tokens / (lag + 1)."""


class AReaL(Section):
    kind: Literal["areal"] = "areal"
    eta: CountOrZero = 4
    """Largest staleness."""


class Laminar(Section):
    kind: Literal["laminar"] = "laminar"
    staleness_max: CountOrZero | None = 4
    """Bound on staleness; None: unbounded, as in the paper."""
    round_groups: Count | None = None
    """Groups a replica starts under one version; None: derive batch.prompts / replicas."""
    repack: bool = True
    """Move the last trajectories of nearly idle replicas together, so that the others can refresh."""
    repack_interval_s: Seconds = 5.0
    """Time between two such looks, beside the one after each update."""
    kv_fraction_max: float = Field(default=0.9, gt=0, le=1)
    """C_max: KV use, as a fraction of capacity, up to which a destination is filled."""
    batch_max: Count | None = None
    """B: the roofline decode batch; None: the replica's slots."""


class Millrace(Section):
    kind: Literal["millrace"] = "millrace"
    staleness_max: CountOrZero | None = 4
    """Bound on staleness; None: unbounded. What is allowed: see `ahead` for what is usual."""
    ahead: float | None = Field(default=None, ge=1, le=64)
    """Batches that generation runs ahead of the trainer. Where completions are long, more are faster, and the
    data older. None: as many as measured durations need, at most half of the bound where the trainer is the
    slower side."""
    repack_interval_s: Seconds = 5.0
    """Time between two looks for replicas to empty, beside the one after each update."""
    batch_max: Count | None = None
    """Trajectories up to which a replica takes others' in; None: what it surely runs, at most 48."""


class RLAX(Section):
    kind: Literal["rlax"] = "rlax"
    reload_staleness: CountOrZero = 0
    """A replica further behind the newest version than this must refresh (discarding partials)."""
    acceptance_staleness: CountOrZero = 0
    """Oldest rollout the trainer accepts."""

    @model_validator(mode="after")
    def _reload_within_acceptance(self) -> RLAX:
        if self.reload_staleness > self.acceptance_staleness:
            raise ValueError(
                f"`schedule.reload_staleness` ({self.reload_staleness}) must not exceed "
                f"`schedule.acceptance_staleness` ({self.acceptance_staleness}): "
                "replicas would generate what the trainer refuses"
            )
        return self


class FunctionSchedule(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a function of the whole configuration that returns a
    `millrace.schedule.Schedule`. See examples/schedule.py."""
    staleness_max: CountOrZero | None = 4
    """Bound on staleness, for the function to use; None: unbounded."""


Schedule = Annotated[
    Synchronous | LlamaRL | AReaL | Laminar | Millrace | RLAX | FunctionSchedule, Field(discriminator="kind")
]

# ---------------------------------------------------------------- roles


class Rollout(Section):
    replicas: int = Field(default=2, ge=1, le=1024)
    """Inference processes."""
    engine: Literal["own", "vllm"] = "own"
    """The inference software in a replica. What it cannot do is refused at the start."""
    python: str | None = None
    """Path of the Python that runs the replicas, for an engine that needs its own; None: Millrace's."""
    slots: int = Field(default=32, ge=1, le=65_536)
    """Trajectories that one replica decodes at the same time."""
    max_sequence_tokens: int = Field(default=512, ge=16, le=COUNT_MAX)
    """Prompt and completion together at most; longer prompts are skipped and counted."""
    prefill_chunk: int = Field(default=512, ge=16, le=COUNT_MAX)
    """Prompt tokens computed between two decode steps."""
    report_interval_s: float = Field(default=0.1, ge=0.001, le=0.5)
    """How often a replica streams new tokens."""
    exact: bool = False
    """Tokens and log-probs of a trajectory do not depend, bit for bit, on what is computed beside it, where,
    or after which restart. On a CPU only, slower, on one thread; refused where it cannot be had."""
    recompute: bool = True
    """After new weights, keys and values of trajectories in flight are computed again. False: a trajectory
    goes on with those it has. That is faster, and its log-probs are those of no single version."""


class Weights(Section):
    slots: int | None = Field(default=None, ge=2, le=1024)
    """Versions the relay holds at most. None: the staleness bound + 3, at most 8. It holds fewer, at least 2,
    where the host has no room."""


class Supervision(Section):
    heartbeat_timeout_s: float = Field(default=10.0, ge=2, le=SECONDS_MAX)
    """A worker that does not answer a heartbeat within this is killed and restarted, as is a replica that
    sends no report for this long. A worker that hears nothing from the controller for three times as long
    stops itself."""
    restarts: CountOrZero = 5
    """Restarts per worker within `restart_window_s`, after which the run stops."""
    restart_window_s: Seconds = 300.0
    """See `restarts`."""
    backoff_s: float = Field(default=0.1, ge=0, le=10)
    """Before the first restart; doubles with each, up to 10 s."""
    attempts: Count = 3
    """Times in a row that a replica dies while it decodes a trajectory, without a new token of it, before
    its prompt is quarantined."""
    stall_s: float = Field(default=300.0, ge=1, le=SECONDS_MAX)
    """Without any progress for this long, the run stops and says who waits for whom. What is waited for
    within its own deadline (a step, a load, a reward) is no stall. From 20 s on the run says who waits, and
    goes on."""
    step_timeout_s: float = Field(default=600.0, ge=1, le=SECONDS_MAX)
    """One command may take this long; after the first of its kind, ten times the longest so far. One whose
    process does nothing at all is killed after 20 s."""
    spawn_timeout_s: float = Field(default=120.0, ge=1, le=SECONDS_MAX)
    """A worker must be ready within this long of its start."""


class Checkpoints(Section):
    every: Count = 20
    """Optimizer steps between checkpoints; one is always made at the end."""
    keep: Count = 2
    """Newest checkpoints that stay."""


def _listening(value: object) -> object:
    """A port alone is one of this host's loopback address."""
    host, _, port = str(value).rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65_535 or not host.strip("[]").isascii():
        raise ValueError(f"`observe.prometheus` ({value}) must be PORT or HOST:PORT, the port 1 to 65535")
    return f"{host or '127.0.0.1'}:{port}"


ListenAddress = Annotated[str, BeforeValidator(_listening)]


class Observe(Section):
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""
    wandb: str | None = None
    """W&B project; needs the `wandb` extra."""
    mlflow: str | None = None
    """MLflow experiment; needs the `mlflow` extra."""
    prometheus: ListenAddress | None = None
    """Serve metrics for Prometheus at this `HOST:PORT`; a port alone is one of the loopback address. Needs
    the `prometheus` extra."""
    notify: str | None = None
    """Whom to tell of a stall, a worker's death, a finding of the doctor and the end. A command line gets a
    JSON object on its standard input; a URL gets it by POST. `$NAME` is what the environment variable NAME
    holds. Of a URL the run directory keeps only the host. See docs/watching.md."""
    samples_every: Count | None = 10
    """Steps between samples as text: the best, the middle and the worst answer to one prompt of the batch.
    They go to the live view, to `events.jsonl`, and to TensorBoard, W&B and MLflow where these are on. None:
    no samples."""


class Config(Section):
    """A run."""

    steps: Count = 100
    """Optimizer steps."""
    seed: Seed = 0
    """Of everything random in the run: prompt order and sampling noise."""
    model: Model
    task: Task
    reward: Reward
    batch: BatchShape = BatchShape()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: Algorithm = GRPO()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Millrace()
    rollout: Rollout = Rollout()
    weights: Weights = Weights()
    supervision: Supervision = Supervision()
    checkpoints: Checkpoints = Checkpoints()
    observe: Observe = Observe()

    @property
    def trajectories_per_step(self) -> int:
        return self.batch.prompts * self.batch.group_size

    @property
    def staleness_bound(self) -> int | None:
        """Largest staleness the schedule admits; None: unbounded."""
        schedule = self.schedule
        match schedule:
            case Synchronous():
                return 0
            case LlamaRL():
                return schedule.lag
            case AReaL():
                return schedule.eta
            case RLAX():
                return schedule.acceptance_staleness
            case Laminar() | Millrace() | FunctionSchedule():
                return schedule.staleness_max

    @property
    def relay_slots(self) -> int:
        """Versions that the relay holds where there is room: every version in use, one being written, one
        spare."""
        if self.weights.slots is not None:
            return self.weights.slots
        bound = self.staleness_bound
        return 8 if bound is None else min(8, bound + 3)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.sampling.max_tokens >= self.rollout.max_sequence_tokens:
            raise ValueError(
                f"`sampling.max_tokens` ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"`rollout.max_sequence_tokens` ({self.rollout.max_sequence_tokens})"
            )
        if self.reward.kind == "gym" and self.task.kind != "gym":
            raise ValueError('`reward.kind` "gym" needs `task.kind` "gym": use "exact", "math" or "function"')
        if self.reward.kind in ("exact", "math") and self.task.kind != "gym" and self.task.answer is None:
            raise ValueError(
                f'`reward.kind` "{self.reward.kind}" compares with an answer, and `task.answer` is "none": '
                "name the column with the answer"
            )
        if self.sampling.temperature < 0.01 or self.sampling.top_k == 1:
            raise ValueError(
                f"`sampling.temperature` ({self.sampling.temperature}) must be 0.01 or more in training, and "
                f"`sampling.top_k` ({self.sampling.top_k}) 0 or at least 2: greedy trajectories are all equal"
            )
        if self.rollout.exact and not self.rollout.recompute:
            raise ValueError(
                "`rollout.exact` (true) needs `rollout.recompute` (true): with keys and values of an earlier "
                "version, a trajectory goes on otherwise than after a move"
            )
        return self
