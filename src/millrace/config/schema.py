"""Every configuration key, with its meaning and default. Frozen once loaded.

Alternatives are tagged unions on `kind`. `None` means off, in TOML `"none"`. Derived numbers are properties.
Every number is finite and has a range. Outside its range a run would learn nothing, unlearn, or never begin.
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
    """Number format of published weights and of products. Without bfloat16 instructions a CPU computes
    products in float32. The trainer's master weights are always float32."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is a GPU."""
    recompute: bool = False
    """The trainer keeps only each layer's input, and computes the rest again for the gradient. The gradient
    is the same. Memory falls to a fraction, and work rises by a third."""


class GymTask(Section):
    kind: Literal["gym"] = "gym"
    name: str
    """A reasoning-gym data set, for example `chain_sum`."""
    options: dict[str, int | float | str | bool | list[str] | list[int]] = {}
    """Keywords for `reasoning_gym.create_dataset`."""
    size: Count = 100_000
    """Number of distinct rows. A row is generated when it is needed."""
    data_seed: Seed = 1
    """Seed of the rows. Held-out evaluation uses a different seed."""
    template: str = "{question}\n"
    """Prompt text, unless `chat` is true."""
    chat: bool = False
    """Render `template` as a user message through the tokenizer's chat template."""


class FileTask(Section):
    kind: Literal["file"] = "file"
    path: str
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a data set directory."""
    prompt: str = "prompt"
    """The column with the prompt: a string or a list of chat messages. `a.b` is the key `b` of column `a`."""
    answer: str | None = "answer"
    """The column with the reference answer, for example `reward_model.ground_truth`. `"none"`: no column."""
    template: str = "{prompt}"
    """Prompt text from the row's columns, unless `chat` is true."""
    chat: bool = False
    """Render `template`, or the column's messages, through the tokenizer's chat template."""


class FunctionTask(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a function without arguments. The function returns a sequence
    of rows (dicts), the same rows at every call. See examples/environment.py."""
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
    """Deadline of one scoring call. After the deadline the worker is killed, and the trajectory fails."""
    memory_mb: int = Field(default=2048, ge=64, le=2**24)
    """Memory that a reward worker may use, beyond its memory after the start and the imports."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Number of reward processes."""


class GymReward(RewardLimits):
    kind: Literal["gym"] = "gym"
    """The scorer of the gym task's own data set."""
    extract: str | None = None
    """Regular expression with one group that finds the answer in the completion. `"none"`: the answer is the
    whole completion."""
    threshold: float = Field(default=0.5, ge=0, le=1)
    """A score below the threshold becomes 0, because some scorers give small credit for anything."""


class MathReward(RewardLimits):
    kind: Literal["math"] = "math"
    """math-verify compares the completion with the answer column."""
    extract_answer: str | None = None
    """Regular expression with one group that finds the reference in the answer column. GSM8K: `#### (.+)`.
    `"none"`: the reference is the whole column."""


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
    """Tokens per packed micro-batch in the trainer. The budget changes speed and memory, never a gradient."""


class SamplingConfig(Section):
    max_tokens: Count = 128
    """Longest completion. A completion of this length is truncated."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Training: 0.01 to 100. Evaluation: 0, too, which takes the most probable token."""
    top_p: float = Field(default=1.0, ge=0.01, le=1)
    """Sample from the smallest set of tokens that has this probability. 1 is off."""
    top_k: CountOrZero = 0
    """Sample from this many most probable tokens. Training: 2 or more. 0 is off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens with at least this fraction of the highest probability. 0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Tokens of prompt or completion: positive logits are divided, negative ones multiplied. 1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logit of every token of the completion."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logit of a token once for each time that the token is in the completion."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a completion, beside the tokenizer's end-of-sequence token."""
    stop_token_ids: tuple[CountOrZero, ...] = ()
    """Ids of more tokens that end a completion."""
    ignore_eos: bool = False
    """The end-of-sequence token does not end a completion; `stop`, `stop_token_ids` and `max_tokens` do."""
    allowed_token_ids: tuple[CountOrZero, ...] | None = Field(default=None, min_length=2)
    """Only these tokens are sampled. `"none"`: all tokens."""
    banned_token_ids: tuple[CountOrZero, ...] = ()
    """These tokens are never sampled."""

    @model_validator(mode="after")
    def _something_is_left(self) -> SamplingConfig:
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise ValueError("`sampling.banned_token_ids` bans all of `sampling.allowed_token_ids`")
        return self


class GRPO(Section):
    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower bound of the ratio current/proximal: 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0, le=100)
    """Upper bound of the ratio current/proximal: 1 + clip_high."""
    scale: Literal["std", "none"] = "std"
    """`"std"`: centred rewards are divided by the standard deviation of the group. `"none"`: not divided."""
    normalize: Literal["sequence", "token", "max_tokens"] = "token"
    """`"token"`: mean over all tokens (DAPO). `"sequence"`: mean per sequence, then over sequences (GRPO).
    `"max_tokens"`: sum over all tokens, divided by sequences x `sampling.max_tokens` (Dr. GRPO)."""
    correction: float | None = Field(default=2.0, ge=1, le=1e6)
    """Cap of the importance weight proximal/behavior (TIS), at least 1. `"none"`: no weight."""
    kl: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the KL penalty towards the initial model."""


class DrGRPO(Section):
    kind: Literal["dr_grpo"] = "dr_grpo"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower bound of the ratio current/proximal: 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0, le=100)
    """Upper bound of the ratio current/proximal: 1 + clip_high."""
    correction: float | None = Field(default=2.0, ge=1, le=1e6)
    """As in `grpo`."""


class AIPO(Section):
    kind: Literal["aipo"] = "aipo"
    rho: float = Field(default=4.0, ge=1, le=1e6)
    """Cap of the importance weight current/behavior. The paper uses 2 to 10."""


class FunctionAlgorithm(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a `millrace.algorithms.Algorithm`. See
    examples/algorithm.py."""


Algorithm = Annotated[GRPO | DrGRPO | AIPO | FunctionAlgorithm, Field(discriminator="kind")]


class Optimizer(Section):
    lr: float = Field(default=1e-6, ge=0, le=1)
    """Learning rate, constant after the warm-up. 0 trains nothing and is for measurements only."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay of the first and of the second moment."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay, on every parameter."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises linearly."""
    grad_clip: float | None = Field(default=1.0, ge=1e-6, le=1e6)
    """Largest global gradient norm. `"none"`: no clipping."""


# ---------------------------------------------------------------- schedule


class Synchronous(Section):
    kind: Literal["synchronous"] = "synchronous"


class LlamaRL(Section):
    kind: Literal["llamarl"] = "llamarl"
    lag: CountOrZero = 1
    """Batches that generation may run ahead. This is also the staleness bound."""
    iteration_tokens: Count | None = None
    """Decode steps under one version, before a replica takes newer weights with trajectories in flight.
    `"none"`: `sampling.max_tokens` / (`lag` + 1)."""


class AReaL(Section):
    kind: Literal["areal"] = "areal"
    eta: CountOrZero = 4
    """Staleness bound."""


class Laminar(Section):
    kind: Literal["laminar"] = "laminar"
    staleness_max: CountOrZero | None = 4
    """Staleness bound. `"none"`: no bound, as in the paper."""
    round_groups: Count | None = None
    """Groups that a replica starts under one version. `"none"`: `batch.prompts` / `rollout.replicas`."""
    repack: bool = True
    """Collect the last trajectories of nearly idle replicas. The emptied replicas take new weights."""
    repack_interval_s: Seconds = 5.0
    """Time between two decisions on repacking. The schedule also decides after each optimizer step."""
    kv_fraction_max: float = Field(default=0.9, gt=0, le=1)
    """A replica receives trajectories up to this fraction of its KV memory (the paper's C_max)."""
    batch_max: Count | None = None
    """A replica receives trajectories up to this number (the paper's batch B). `"none"`: `rollout.slots`."""


class Millrace(Section):
    kind: Literal["millrace"] = "millrace"
    staleness_max: CountOrZero | None = 4
    """Staleness bound: the largest staleness allowed. `"none"`: no bound. The usual staleness follows from
    `ahead`."""
    ahead: float | None = Field(default=None, ge=1, le=64)
    """Batches that generation runs ahead of the trainer. With long completions a larger number is faster, and
    the data is older. `"none"`: derived from measured durations. Where the trainer is the slower side, the
    derived number is at most half of the bound."""
    repack_interval_s: Seconds = 5.0
    """Time between two decisions on repacking. The schedule also decides after each optimizer step."""
    batch_max: Count | None = None
    """A replica receives trajectories up to this number. `"none"`: as many as surely fit, at most 48."""


class RLAX(Section):
    kind: Literal["rlax"] = "rlax"
    reload_staleness: CountOrZero = 0
    """A replica takes new weights as soon as it is more than this many versions behind. Its trajectories
    begin again."""
    acceptance_staleness: CountOrZero = 0
    """Staleness bound: the trainer accepts nothing staler."""

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
    """`package.module:name` or `file.py:name`: a function that takes the whole configuration and returns a
    `millrace.schedule.Schedule`. See examples/schedule.py."""
    staleness_max: CountOrZero | None = 4
    """Staleness bound, for the function to use. `"none"`: no bound."""


Schedule = Annotated[
    Synchronous | LlamaRL | AReaL | Laminar | Millrace | RLAX | FunctionSchedule, Field(discriminator="kind")
]

# ---------------------------------------------------------------- roles


class Rollout(Section):
    replicas: int = Field(default=2, ge=1, le=1024)
    """Number of inference processes."""
    engine: Literal["own", "vllm"] = "own"
    """Inference software in a replica. A setting that the engine cannot follow is refused at the start."""
    python: str | None = None
    """Path of the Python that runs the replicas, for an engine that needs it. `"none"`: Millrace's Python."""
    slots: int = Field(default=32, ge=1, le=65_536)
    """Trajectories that one replica decodes at the same time."""
    max_sequence_tokens: int = Field(default=512, ge=16, le=COUNT_MAX)
    """Most tokens of a prompt and its completion together. Longer prompts are skipped and counted."""
    prefill_chunk: int = Field(default=512, ge=16, le=COUNT_MAX)
    """Prompt tokens computed between two decode steps."""
    report_interval_s: float = Field(default=0.1, ge=0.001, le=0.5)
    """Time between two reports of a replica, each with its new tokens."""
    exact: bool = False
    """Tokens and log-probs of a trajectory are the same, bit for bit, beside any other trajectories, on any
    replica, and after any restart. Slower, on a CPU only, on one thread. Refused where the promise cannot
    be kept."""
    recompute: bool = True
    """After new weights, keys and values of trajectories in flight are computed again. False: a trajectory
    goes on with its old keys and values. This is faster, but its log-probs belong to no single version."""


class Weights(Section):
    slots: int | None = Field(default=None, ge=2, le=1024)
    """Most versions that the relay holds. `"none"`: the staleness bound + 3, at most 8. On a host without
    room the relay holds fewer, at least 2."""


class Supervision(Section):
    heartbeat_timeout_s: float = Field(default=10.0, ge=2, le=SECONDS_MAX)
    """A worker that does not answer a heartbeat within this time is killed and restarted. So is a replica
    that sends no report for this time. A worker that hears nothing from the controller for three times this
    time stops itself."""
    restarts: CountOrZero = 5
    """Most restarts of one worker within `restart_window_s`. At the next death the run stops."""
    restart_window_s: Seconds = 300.0
    """Window in which restarts are counted."""
    backoff_s: float = Field(default=0.1, ge=0, le=10)
    """Time before the first restart. The time doubles with each restart, up to 10 s."""
    attempts: Count = 3
    """A prompt is quarantined after this many deaths of replicas in a row. A death counts for a trajectory
    that the replica decoded and that has no new token."""
    stall_s: float = Field(default=300.0, ge=1, le=SECONDS_MAX)
    """After this time without progress the run stops and says who waits for whom. Waiting for a step, a load
    or a reward within its own deadline is no stall. After 20 s without progress the run says who waits for
    whom, and goes on."""
    step_timeout_s: float = Field(default=600.0, ge=1, le=SECONDS_MAX)
    """Longest time for any command to a worker. After the first command of its kind (a step, a pull), the
    limit is ten times the longest so far, at least 20 s. A worker that does nothing in a command is killed
    after 20 s."""
    spawn_timeout_s: float = Field(default=120.0, ge=1, le=SECONDS_MAX)
    """Time from the start of a worker until the worker must be ready."""


class Checkpoints(Section):
    every: Count = 20
    """Optimizer steps between two checkpoints. A run always ends with a checkpoint."""
    keep: Count = 2
    """Number of newest checkpoints that are kept."""


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
    """W&B project. Needs the `wandb` extra."""
    mlflow: str | None = None
    """MLflow experiment. Needs the `mlflow` extra."""
    prometheus: ListenAddress | None = None
    """Serve metrics for Prometheus at this `HOST:PORT`. A port without a host is on 127.0.0.1. Needs the
    `prometheus` extra."""
    notify: str | None = None
    """A command line or a URL that is told of stalls, deaths of workers, findings of the doctor, and the end.
    A command gets a JSON object on its standard input, a URL gets the object by POST. `$NAME` is the value
    of the environment variable NAME. The run directory keeps only the host of a URL. See docs/watching.md."""
    samples_every: Count | None = 10
    """Steps between samples: the best, the middle and the worst answer to one prompt of the batch, as text.
    Samples go to the live view, to `events.jsonl`, and to TensorBoard, W&B and MLflow where these are on.
    `"none"`: no samples."""


class Config(Section):
    """A run."""

    steps: Count = 100
    """Optimizer steps."""
    seed: Seed = 0
    """Seed of everything random in the run: prompt order and sampling noise."""
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
        """Largest staleness that the schedule admits; None: no bound."""
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
