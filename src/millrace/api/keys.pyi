# Made from the schema by `make docs`.
# ruff: noqa
# fmt: off
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict

class Table(Protocol):
    def model_dump(self) -> dict[str, Any]: ...

class ModelKeys(TypedDict, total=False):
    path: str | PathLike[str]
    date: str | Literal['none'] | None
    dtype: Literal['float32', 'bfloat16']
    device: str
    recompute: bool

class GymTaskKeys(TypedDict, total=False):
    kind: Literal['gym']
    name: str
    options: Mapping[str, int | float | str | bool | Sequence[str] | Sequence[int]]
    size: int
    data_seed: int
    template: str
    chat: bool
    system: str | Literal['none'] | None
    chat_arguments: Mapping[str, bool | int | float | str]

class FileTaskKeys(TypedDict, total=False):
    prompt: str
    answer: str | Literal['none'] | None
    template: str
    chat: bool
    system: str | Literal['none'] | None
    tools: str | Literal['none'] | None
    chat_arguments: Mapping[str, bool | int | float | str]
    kind: Literal['file']
    path: str | PathLike[str]

class HubTaskKeys(TypedDict, total=False):
    prompt: str
    answer: str | Literal['none'] | None
    template: str
    chat: bool
    system: str | Literal['none'] | None
    tools: str | Literal['none'] | None
    chat_arguments: Mapping[str, bool | int | float | str]
    kind: Literal['hub']
    name: str
    subset: str | Literal['none'] | None
    split: str
    revision: str | Literal['none'] | None
    rows_max: int | Literal['none'] | None

class FunctionTaskKeys(TypedDict, total=False):
    prompt: str
    answer: str | Literal['none'] | None
    template: str
    chat: bool
    system: str | Literal['none'] | None
    tools: str | Literal['none'] | None
    chat_arguments: Mapping[str, bool | int | float | str]
    kind: Literal['function']
    path: str | PathLike[str]

class MixtureTaskKeys(TypedDict, total=False):
    kind: Literal['mixture']
    parts: Sequence[MixturePartKeys | Table]
    correct_at: float

class GymRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['gym']
    extract: str | Literal['none'] | None
    threshold: float

class MathRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['math']
    extract_answer: str | Literal['none'] | None
    answer_is: Literal['one', 'any', 'json']

class ExactRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['exact']
    extract: str | Literal['none'] | None
    extract_answer: str | Literal['none'] | None
    answer_is: Literal['one', 'any', 'json']
    compare: Literal['text', 'words', 'f1']

class CodeRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['code']
    tests: str
    function: str | PathLike[str] | Literal['none'] | None
    score: Literal['all', 'share']
    isolation: Literal['namespaces', 'landlock', 'limits']
    program_cpu_s: float
    program_memory_mb: int

class JsonRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['json']
    json_schema: str | Literal['none'] | None
    schema_column: str | Literal['none'] | None
    partial: float
    extract: str | Literal['none'] | None

class PatternRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['pattern']
    pattern: str | Literal['none'] | None
    pattern_column: str | Literal['none'] | None

class JudgeRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['judge']
    url: str
    model: str
    mode: Literal['scalar', 'pairwise']
    rubric: str | Literal['none'] | None
    rubric_column: str | Literal['none'] | None
    show_answer: bool
    score_min: float
    score_max: float
    api_key_env: str | Literal['none'] | None
    temperature: float
    max_tokens: int
    concurrency: int
    requests_per_s: float | Literal['none'] | None
    request_timeout_s: float
    attempts: int
    backoff_s: float
    asked_twice: float

class FunctionRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['function']
    path: str | PathLike[str]
    signature: Literal['millrace', 'trl', 'verl']
    attempts: int
    backoff_s: float

class EnvironmentRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['environment']
    path: str | PathLike[str]
    agent: AgentKeys | Table | Literal['none'] | None
    turns: int
    tool_calls: int | Literal['none'] | None
    episode_tokens: int | Literal['none'] | None
    episode_s: float | Literal['none'] | None
    snapshot_bytes: int
    group_wait_s: float | Literal['none'] | None
    role: str
    result_characters: int

class SumRewardKeys(TypedDict, total=False):
    timeout_s: float
    memory_mb: int
    prove_references: bool
    workers: int
    workers_max: int | Literal['none'] | None
    kind: Literal['sum']
    members: Sequence[RewardMemberKeys | Table]

class BatchShapeKeys(TypedDict, total=False):
    prompts: int
    group_size: int
    screen_samples: int
    token_budget: int
    minibatches: int
    epochs: int

class RestSelectionKeys(TypedDict, total=False):
    retry: float
    correct_at: float
    kind: Literal['rest']
    groups: int

class SignalSelectionKeys(TypedDict, total=False):
    retry: float
    correct_at: float
    kind: Literal['signal']
    discount: float

class SamplingConfigKeys(TypedDict, total=False):
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    allowed_token_ids: Sequence[int] | Literal['none'] | None
    banned_token_ids: Sequence[int]
    logprobs: int
    token_masks: bool
    routing: bool

class PolicyGradientKeys(TypedDict, total=False):
    kind: Literal['grpo', 'dr_grpo', 'dapo', 'rloo', 'reinforce', 'reinforce_pp', 'ppo', 'max_rl', 'mt_grpo', 'gfpo', 'raft', 'aipo', 'decoupled', 'bypass', 'sequence_tis', 'icepop', 'cispo', 'gspo', 'm2po', 'dppo_tv', 'dppo_kl', 'sapo', 'two_sided', 'deepseek_v32']
    baseline: Literal['group', 'others', 'value', 'none']
    scale: Literal['std', 'mean', 'batch', 'none']
    select: Literal['all', 'shortest', 'efficient', 'positive']
    keep: int | Literal['none'] | None
    overlong: float
    truncated: Literal['train', 'mask']
    resample: int
    turn_discount: float | Literal['none'] | None
    sequence_share: float
    ratio: Literal['token', 'sequence']
    anchor: Literal['proximal', 'behavior']
    clip: Literal['ppo', 'weight', 'soft', 'tv', 'kl', 'none']
    clip_low: float
    clip_high: float
    clip_dual: float | Literal['none'] | None
    rho: float
    rho_low: float
    gate_positive: float
    gate_negative: float
    correction: float | Literal['none'] | None
    correction_low: float
    correction_of: Literal['token', 'sequence']
    correction_outside: Literal['clip', 'drop']
    second_moment: float | Literal['none'] | None
    drift: float | Literal['none'] | None
    normalize: Literal['sequence', 'token', 'max_tokens']
    kl: float
    kl_estimator: Literal['k1', 'k2', 'k3']
    kl_in: Literal['loss', 'reward']
    reference: Literal['trainer', 'replica']
    entropy: float
    teacher: str | PathLike[str] | Literal['none'] | None
    teacher_weight: float
    reward_weight: float
    discount: float
    gae_lambda: float
    value_lr: float
    value_trunk: float
    value_clip: float | Literal['none'] | None
    proximal: Literal['recompute', 'interpolate']

class FunctionAlgorithmKeys(TypedDict, total=False):
    kind: Literal['function']
    path: str | PathLike[str]

class OptimizerKeys(TypedDict, total=False):
    rule: Literal['adamw', 'muon']
    lr: float
    decay: Literal['constant', 'linear', 'cosine']
    decay_steps: int | Literal['none'] | None
    lr_end: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    warmup_steps: int
    grad_clip: float | Literal['none'] | None
    states: Literal['float32', '8bit']

class AdapterKeys(TypedDict, total=False):
    rank: int | Literal['none'] | None
    kind: Literal['lora', 'dora']
    alpha: float
    targets: Sequence[str]

class TrainerKeys(TypedDict, total=False):
    backend: Literal['torch', 'jax']
    python: str | Literal['none'] | None
    programs: str | Literal['none'] | None
    shard: int
    tensor: int
    sequence: int
    hosts: int
    quantization: Literal['fp8'] | Literal['none'] | None
    offload: bool
    standby: bool

class SynchronousKeys(TypedDict, total=False):
    kind: Literal['synchronous']

class LlamaRLKeys(TypedDict, total=False):
    kind: Literal['llamarl']
    lag: int
    iteration_tokens: int | Literal['none'] | None

class AReaLKeys(TypedDict, total=False):
    kind: Literal['areal']
    eta: int

class LaminarKeys(TypedDict, total=False):
    kind: Literal['laminar']
    staleness_max: int | Literal['none'] | None
    round_groups: int | Literal['none'] | None
    repack: bool
    repack_interval_s: float
    kv_fraction_max: float
    batch_max: int | Literal['none'] | None

class MillraceKeys(TypedDict, total=False):
    kind: Literal['millrace']
    staleness_max: int | Literal['none'] | None
    ahead: float | Literal['none'] | None
    repack_interval_s: float
    batch_max: int | Literal['none'] | None
    mix: Literal['between', 'never']
    redundant_samples: int
    redundant_groups: int

class RLAXKeys(TypedDict, total=False):
    kind: Literal['rlax']
    reload_staleness: int
    acceptance_staleness: int

class RLBoostKeys(TypedDict, total=False):
    kind: Literal['rlboost']
    staleness_max: int

class RollFlashKeys(TypedDict, total=False):
    kind: Literal['roll_flash']
    alpha: int
    redundant_samples: int
    redundant_groups: int
    mix: Literal['within', 'between', 'never']

class RollPackerKeys(TypedDict, total=False):
    kind: Literal['rollpacker']
    redundant_samples: int
    redundant_groups: int | Literal['none'] | None

class StreamRLKeys(TypedDict, total=False):
    kind: Literal['streamrl']
    staleness_max: int
    mix: Literal['within', 'between', 'never']

class StaleFlowKeys(TypedDict, total=False):
    kind: Literal['staleflow']
    staleness_max: int

class HeddleKeys(TypedDict, total=False):
    kind: Literal['heddle']
    staleness_max: int

class FunctionScheduleKeys(TypedDict, total=False):
    kind: Literal['function']
    path: str | PathLike[str]
    staleness_max: int | Literal['none'] | None

class RolloutKeys(TypedDict, total=False):
    replicas: int
    engine: Literal['own', 'vllm', 'server']
    servers: Sequence[str]
    shared_dir: str | PathLike[str] | Literal['none'] | None
    python: str | Literal['none'] | None
    packed: bool
    colocated: bool
    slots: int
    max_sequence_tokens: int
    tensor: int
    prefill_chunk: int
    report_interval_s: float
    exact: bool
    recompute: bool
    keep_kv: bool
    quantization: Literal['fp8'] | Literal['none'] | None
    stepwise: bool
    seeded: bool
    probe: bool
    drafts: Literal['earlier', 'trained', 'ngram', 'suffix', 'mtp', 'eagle'] | Literal['none'] | None
    draft_tokens: int
    draft_rows_max: int
    draft_model: str | PathLike[str] | Literal['none'] | None
    native_adapters: bool

class WeightsKeys(TypedDict, total=False):
    slots: int | Literal['none'] | None
    directory: str | Literal['none'] | None
    anchor_every: int
    transport: Literal['tcp', 'nixl']

class LocalHostsKeys(TypedDict, total=False):
    kind: Literal['local']
    hosts: int

class RayClusterKeys(TypedDict, total=False):
    kind: Literal['ray']
    address: str

class SupervisionKeys(TypedDict, total=False):
    heartbeat_timeout_s: float
    restarts: int
    restart_window_s: float
    backoff_s: float
    attempts: int
    stall_s: float
    step_timeout_s: float
    spawn_timeout_s: float
    stop_grace_s: float

class CheckpointsKeys(TypedDict, total=False):
    every: int
    keep: int

class ObserveKeys(TypedDict, total=False):
    tags: Sequence[str]
    tensorboard: bool
    wandb: str | Literal['none'] | None
    mlflow: str | Literal['none'] | None
    trackio: str | Literal['none'] | None
    prometheus: str | Literal['none'] | None
    notify: str | Literal['none'] | None
    samples_every: int | Literal['none'] | None

class EvaluationKeys(TypedDict, total=False):
    name: str
    every: int
    prompts: int
    samples: int
    task: Literal['gym', 'file', 'function'] | GymTaskKeys | Table | FileTaskKeys | Table | FunctionTaskKeys | Table | Literal['none'] | None
    reward: Literal['gym', 'math', 'exact', 'code', 'json', 'pattern', 'judge', 'function', 'environment', 'sum'] | GymRewardKeys | Table | MathRewardKeys | Table | ExactRewardKeys | Table | CodeRewardKeys | Table | JsonRewardKeys | Table | PatternRewardKeys | Table | JudgeRewardKeys | Table | FunctionRewardKeys | Table | EnvironmentRewardKeys | Table | SumRewardKeys | Table | Literal['none'] | None
    canary: Literal['rows', 'wrong-gold'] | Literal['none'] | None
    correct_at: float
    by: Literal['greedy', 'sampled', 'pass', 'majority', 'reward']
    patience: int | Literal['none'] | None
    keep_best: bool
    share: float
    timeout_s: float

class RewardMemberKeys(TypedDict, total=False):
    name: str
    weight: float
    leave_out: Literal['never', 'abstained', 'failed']
    reward: Literal['gym', 'math', 'exact', 'code', 'json', 'pattern', 'judge', 'function', 'environment'] | GymRewardKeys | Table | MathRewardKeys | Table | ExactRewardKeys | Table | CodeRewardKeys | Table | JsonRewardKeys | Table | PatternRewardKeys | Table | JudgeRewardKeys | Table | FunctionRewardKeys | Table | EnvironmentRewardKeys | Table

class AgentKeys(TypedDict, total=False):
    command: Sequence[str]
    function: str | PathLike[str] | Literal['none'] | None
    variables: Mapping[str, str]
    task_directory: str | Literal['none'] | None
    recovery: Literal['replayed', 'failed']
    end_s: float
    memory_mb: int

class MixturePartKeys(TypedDict, total=False):
    name: str
    weight: float
    task: Literal['gym', 'file', 'hub', 'function'] | GymTaskKeys | Table | FileTaskKeys | Table | HubTaskKeys | Table | FunctionTaskKeys | Table
    reward: Literal['gym', 'math', 'exact', 'code', 'json', 'pattern', 'judge', 'function', 'environment', 'sum'] | GymRewardKeys | Table | MathRewardKeys | Table | ExactRewardKeys | Table | CodeRewardKeys | Table | JsonRewardKeys | Table | PatternRewardKeys | Table | JudgeRewardKeys | Table | FunctionRewardKeys | Table | EnvironmentRewardKeys | Table | SumRewardKeys | Table | Literal['none'] | None

class ResumeKeys(TypedDict, total=False):
    steps: int
    seed: int
    allow: Sequence[Literal['uncorrected', 'cut_sampling', 'false_positives']]
    model: ModelKeys | Table
    task: Literal['gym', 'file', 'hub', 'function', 'mixture'] | GymTaskKeys | Table | FileTaskKeys | Table | HubTaskKeys | Table | FunctionTaskKeys | Table | MixtureTaskKeys | Table
    reward: Literal['gym', 'math', 'exact', 'code', 'json', 'pattern', 'judge', 'function', 'environment', 'sum'] | GymRewardKeys | Table | MathRewardKeys | Table | ExactRewardKeys | Table | CodeRewardKeys | Table | JsonRewardKeys | Table | PatternRewardKeys | Table | JudgeRewardKeys | Table | FunctionRewardKeys | Table | EnvironmentRewardKeys | Table | SumRewardKeys | Table
    batch: BatchShapeKeys | Table
    selection: Literal['rest', 'signal'] | RestSelectionKeys | Table | SignalSelectionKeys | Table | Literal['none'] | None
    sampling: SamplingConfigKeys | Table
    algorithm: Literal['grpo', 'dr_grpo', 'dapo', 'rloo', 'reinforce', 'reinforce_pp', 'ppo', 'max_rl', 'mt_grpo', 'gfpo', 'raft', 'aipo', 'decoupled', 'bypass', 'sequence_tis', 'icepop', 'cispo', 'gspo', 'm2po', 'dppo_tv', 'dppo_kl', 'sapo', 'two_sided', 'deepseek_v32', 'function'] | PolicyGradientKeys | Table | FunctionAlgorithmKeys | Table
    optimizer: OptimizerKeys | Table
    adapter: AdapterKeys | Table
    trainer: TrainerKeys | Table
    schedule: Literal['synchronous', 'llamarl', 'areal', 'laminar', 'millrace', 'rlax', 'rlboost', 'roll_flash', 'rollpacker', 'streamrl', 'staleflow', 'heddle', 'function'] | SynchronousKeys | Table | LlamaRLKeys | Table | AReaLKeys | Table | LaminarKeys | Table | MillraceKeys | Table | RLAXKeys | Table | RLBoostKeys | Table | RollFlashKeys | Table | RollPackerKeys | Table | StreamRLKeys | Table | StaleFlowKeys | Table | HeddleKeys | Table | FunctionScheduleKeys | Table
    rollout: RolloutKeys | Table
    weights: WeightsKeys | Table
    runtime: Literal['local', 'ray'] | LocalHostsKeys | Table | RayClusterKeys | Table
    supervision: SupervisionKeys | Table
    checkpoints: CheckpointsKeys | Table
    observe: ObserveKeys | Table
    evaluations: Sequence[EvaluationKeys | Table]

class TrainKeys(TypedDict, total=False):
    steps: int
    seed: int
    allow: Sequence[Literal['uncorrected', 'cut_sampling', 'false_positives']]
    model: ModelKeys | Table
    task: Literal['gym', 'file', 'hub', 'function', 'mixture'] | GymTaskKeys | Table | FileTaskKeys | Table | HubTaskKeys | Table | FunctionTaskKeys | Table | MixtureTaskKeys | Table
    batch: BatchShapeKeys | Table
    selection: Literal['rest', 'signal'] | RestSelectionKeys | Table | SignalSelectionKeys | Table | Literal['none'] | None
    sampling: SamplingConfigKeys | Table
    optimizer: OptimizerKeys | Table
    adapter: AdapterKeys | Table
    trainer: TrainerKeys | Table
    rollout: RolloutKeys | Table
    weights: WeightsKeys | Table
    runtime: Literal['local', 'ray'] | LocalHostsKeys | Table | RayClusterKeys | Table
    supervision: SupervisionKeys | Table
    checkpoints: CheckpointsKeys | Table
    observe: ObserveKeys | Table
    evaluations: Sequence[EvaluationKeys | Table]

class EvaluateKeys(TypedDict, total=False):
    steps: int
    seed: int
    allow: Sequence[Literal['uncorrected', 'cut_sampling', 'false_positives']]
    task: Literal['gym', 'file', 'hub', 'function', 'mixture'] | GymTaskKeys | Table | FileTaskKeys | Table | HubTaskKeys | Table | FunctionTaskKeys | Table | MixtureTaskKeys | Table
    batch: BatchShapeKeys | Table
    selection: Literal['rest', 'signal'] | RestSelectionKeys | Table | SignalSelectionKeys | Table | Literal['none'] | None
    sampling: SamplingConfigKeys | Table
    algorithm: Literal['grpo', 'dr_grpo', 'dapo', 'rloo', 'reinforce', 'reinforce_pp', 'ppo', 'max_rl', 'mt_grpo', 'gfpo', 'raft', 'aipo', 'decoupled', 'bypass', 'sequence_tis', 'icepop', 'cispo', 'gspo', 'm2po', 'dppo_tv', 'dppo_kl', 'sapo', 'two_sided', 'deepseek_v32', 'function'] | PolicyGradientKeys | Table | FunctionAlgorithmKeys | Table
    optimizer: OptimizerKeys | Table
    adapter: AdapterKeys | Table
    trainer: TrainerKeys | Table
    schedule: Literal['synchronous', 'llamarl', 'areal', 'laminar', 'millrace', 'rlax', 'rlboost', 'roll_flash', 'rollpacker', 'streamrl', 'staleflow', 'heddle', 'function'] | SynchronousKeys | Table | LlamaRLKeys | Table | AReaLKeys | Table | LaminarKeys | Table | MillraceKeys | Table | RLAXKeys | Table | RLBoostKeys | Table | RollFlashKeys | Table | RollPackerKeys | Table | StreamRLKeys | Table | StaleFlowKeys | Table | HeddleKeys | Table | FunctionScheduleKeys | Table
    rollout: RolloutKeys | Table
    weights: WeightsKeys | Table
    runtime: Literal['local', 'ray'] | LocalHostsKeys | Table | RayClusterKeys | Table
    supervision: SupervisionKeys | Table
    checkpoints: CheckpointsKeys | Table
    observe: ObserveKeys | Table
    evaluations: Sequence[EvaluationKeys | Table]
