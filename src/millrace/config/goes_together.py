"""What does not go together in one configuration, with the remedy. One reason at a time: the first. Pure.

`refuse` is asked whenever a configuration is read. `refuse_start`, `unless_allowed` and `oversized` are asked
before a run starts: other commands may read what a run may not begin with. A user who means one of
`unless_allowed` names it in `allow`.

`trainer.backend = "jax"` lacks some parts. `rollout.native_adapters` computes an adapter beside the weights.
`rollout.colocated` has one device, which trainer and replicas use in shifts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from millrace.config.keys import Keys
from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.tables.operation import LocalHosts
from millrace.config.tables.schedules import AReaL, LlamaRL, redundant_samples
from millrace.config.tables.task import GymTaskSection, OneReward, Reward, Task, members_of
from millrace.config.toml_text import as_toml
from millrace.core.errors import ConfigError


def refuse(config: Keys) -> None:
    """Raises: ValueError: two keys contradict each other."""
    _evaluable(config)
    _screens(config)
    _consistent(config)
    _prompts_make_sense(config)


def _evaluable(config: Keys) -> None:
    names = [evaluation.name for evaluation in config.evaluations]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"`evaluations`: {twice[0]!r} is the name of two: give each its own")
    if config.evaluations and config.rollout.servers:
        raise ValueError(
            "`evaluations` need a replica that the run starts itself, and `rollout.servers` names "
            "servers: leave one of them out, and evaluate checkpoints with `millrace eval`"
        )
    for evaluation in config.evaluations:
        _check_evaluation(config, evaluation, f"`evaluations` ({evaluation.name})")


def _check_evaluation(config: Keys, evaluation: EvaluationSection, which: str) -> None:
    own_rows = isinstance(config.task, GymTaskSection) and evaluation.canary != "rows"
    if evaluation.task is None and not own_rows and evaluation.canary != "wrong-gold":
        raise ValueError(
            f"{which} needs a `task` of its own: the rows of `task` are trained on.\n"
            '  Name a file that training does not read: task = { kind = "file", path = "..." }'
        )
    whole = config.of_evaluation(evaluation)
    _check_reward(whole.one_task, whole.reward, f"{which}: ")
    least = {"greedy": 0, "majority": 2}.get(evaluation.by, 1)
    if evaluation.samples < least:
        raise ValueError(
            f'{which}: `by` ("{evaluation.by}") needs `samples` of at least {least}, not {evaluation.samples}'
        )
    if evaluation.by == "majority" and whole.reward.kind == "environment":
        raise ValueError(f'{which}: `by` ("majority") counts answers, and an episode has none: use "pass"')
    if evaluation.canary == "wrong-gold" and whole.reward.kind == "environment":
        raise ValueError(
            f"{which}: an environment with the gold of another row answers by it, and pays for what it "
            'showed.\n  Set `canary` to "rows", with a `task` of rows that deserve no reward'
        )
    judges = evaluation.keep_best or evaluation.patience is not None
    if evaluation.canary and (judges or evaluation.samples == 0 or evaluation.correct_at <= 0):
        raise ValueError(
            f"{which}: a canary must earn nothing, so no version is its best: leave `keep_best` and "
            "`patience` out, and set `samples` to at least 1 and `correct_at` above 0"
        )
    if evaluation.keep_best and evaluation.every % config.checkpoints.every:
        raise ValueError(
            f"{which}: with `keep_best`, `every` ({evaluation.every}) must be a multiple of "
            f"`checkpoints.every` ({config.checkpoints.every}): only those versions have a checkpoint"
        )


def _screens(config: Keys) -> None:
    a, redundant = config.policy_gradient, redundant_samples(config.schedule)
    if config.batch.screen_samples and redundant:
        raise ValueError(
            f"`batch.screen_samples` ({config.batch.screen_samples}) waits for the first trajectories of a "
            f"group, and `schedule.redundant_samples` ({redundant}) for none in particular.\n"
            "  Set one of them to 0"
        )
    if config.batch.screen_samples and a is not None and a.learns_from_equal_rewards:
        raise ValueError(
            f"`batch.screen_samples` ({config.batch.screen_samples}) ends groups whose first rewards are "
            f"all equal, and `algorithm` ({a.kind}) learns from them: by `baseline` ({a.baseline}), "
            f"`teacher` ({a.teacher}), `turn_discount` ({a.turn_discount}) or `sequence_share` "
            f"({a.sequence_share}).\n  Set it to 0"
        )


def _consistent(config: Keys) -> None:
    if config.sampling.max_tokens >= config.rollout.max_sequence_tokens:
        raise ValueError(
            f"`sampling.max_tokens` ({config.sampling.max_tokens}) leaves no room for a prompt in "
            f"`rollout.max_sequence_tokens` ({config.rollout.max_sequence_tokens})"
        )
    if config.batch.minibatches > config.batch.prompts:
        raise ValueError(
            f"`batch.minibatches` ({config.batch.minibatches}) must be at most `batch.prompts` "
            f"({config.batch.prompts}): a part has whole groups"
        )
    a = config.policy_gradient
    if a is not None and (keep := a.keep) is not None and keep >= config.batch.group_size:
        raise ValueError(
            f"`algorithm.keep` ({keep}) must be less than `batch.group_size` ({config.batch.group_size}): "
            "nothing would be left out"
        )
    if config.optimizer.rule == "muon" and (config.trainer.ranks > 1 or config.trainer.offload):
        raise ValueError(
            '`optimizer.rule` ("muon") needs whole matrices: a trainer of one rank, not '
            f"{config.trainer.ranks}, and without `trainer.offload`"
        )
    if config.adapter.rank is not None and config.trainer.tensor > 1 and config.trainer.backend == "torch":
        raise ValueError(
            f"`adapter.rank` ({config.adapter.rank}) needs whole matrices, and `trainer.tensor` "
            f"({config.trainer.tensor}) divides them.\n  Set `trainer.tensor` to 1, and use `trainer.shard`"
        )
    if config.trainer.backend == "jax" and (why := why_not_jax(config)):
        raise ValueError(f'`trainer.backend` ("jax") {why}')
    if config.reference_apart and (why := _reference_elsewhere(config)):
        raise ValueError(f'`algorithm.reference` ("replica") {why}.\n  Set it to "trainer"')
    _check_replicas(config)
    if config.rollout.python is not None and config.runtime.kind == "ray":
        raise ValueError(
            f"`rollout.python` ({config.rollout.python}) starts replicas of one machine. On Ray every "
            "worker runs in the Python of its node: install the engine there"
        )
    if ":" in config.model.device and config.runtime.kind == "ray":
        raise ValueError(
            f"`model.device` ({config.model.device!r}) names a GPU of one machine, and Ray has several.\n"
            '  Set it to "cuda", and start Ray on each node with the GPUs that the run may use'
        )
    if config.sampling.temperature < 0.01 or config.sampling.top_k == 1:
        raise ValueError(
            f"`sampling.temperature` ({config.sampling.temperature}) must be 0.01 or more in training, and "
            f"`sampling.top_k` ({config.sampling.top_k}) 0 or at least 2: greedy trajectories are all equal"
        )
    if config.rollout.exact and not config.rollout.recompute:
        raise ValueError(
            "`rollout.exact` (true) needs `rollout.recompute` (true): with keys and values of an earlier "
            "version, a trajectory goes on otherwise than after a move"
        )


def _prompts_make_sense(config: Keys) -> None:
    for name, part in config.by_part.items():
        if name and part.reward.kind == "environment":
            raise ValueError(f'`task.parts` ({name}): `reward.kind` "environment" is for a run of one task')
        _check_reward(part.one_task, part.reward, f"`task.parts` ({name}): " if name else "")
    a = config.policy_gradient
    ends = {"algorithm.resample": a.resample if a is not None else 0}
    ends["batch.screen_samples"] = config.batch.screen_samples
    for key, value in ends.items():
        if config.selection is not None and value:
            raise ValueError(
                f"`selection` learns from trained groups, and `{key}` ({value}) ends groups without "
                f'signal before.\n  Set `{key}` to 0, or `selection` to "none"'
            )


def _check_replicas(config: Keys) -> None:
    rollout = config.rollout
    for key, is_set, why_not in (
        ("colocated", rollout.colocated, why_not_colocated),
        ("native_adapters", rollout.native_adapters, why_not_native),
    ):
        if is_set and (why := why_not(config)):
            raise ValueError(f"`rollout.{key}` (true) {why}")


def _reference_elsewhere(config: Keys) -> str:
    """Why a process of its own is not for the reference; empty: it is."""
    rollout, rank = config.rollout, config.adapter.rank
    if rollout.servers:
        return "takes the place of a replica, and `rollout.servers` names servers"
    if rollout.tensor > 1:
        return f"has one device, and with `rollout.tensor` ({rollout.tensor}) a replica has several"
    if rank is not None:
        return f"is not needed: with `adapter.rank` ({rank}) the model without its adapter is the reference"
    return ""


def _check_reward(task: Task, reward: Reward, which: str = "") -> None:
    for name, part in members_of(reward).items():
        _check_one(task, part, f"{which}`reward.members` ({name}): " if name else which)


def _check_one(task: Task, reward: OneReward, which: str) -> None:
    if reward.kind == "gym" and task.kind != "gym":
        raise ValueError(
            f'{which}`reward.kind` "gym" needs `task.kind` "gym": use "exact", "math" or "function"'
        )
    needs_answer = reward.kind in ("exact", "math") or (
        reward.kind == "judge" and (reward.show_answer or reward.mode == "pairwise")
    )
    if needs_answer and task.kind != "gym" and task.answer is None:
        raise ValueError(
            f'{which}`reward.kind` "{reward.kind}" compares with an answer, and `task.answer` is "none": '
            "name the column with the answer"
        )


def why_not_jax(config: Keys) -> str:
    """The first reason. Empty: there is none."""
    return next(_jax_lacks(config), "")


def _jax_lacks(config: Keys) -> Iterator[str]:
    adapter, optimizer, trainer = config.adapter, config.optimizer, config.trainer
    needed = (
        ("adapter.kind", adapter.kind if adapter.rank else "lora", "lora", "only LoRA was written for JAX"),
        ("optimizer.rule", optimizer.rule, "adamw", "only AdamW was written for JAX"),
        ("optimizer.states", optimizer.states, "float32", "JAX keeps its moments in float32"),
        ("trainer.quantization", trainer.quantization, None, "only bfloat16 was written for JAX"),
        ("trainer.offload", trainer.offload, False, "its state stays on the devices: divide it by more"),
        ("trainer.standby", trainer.standby, False, "a TPU serves one process at a time"),
        ("trainer.hosts", trainer.hosts if adapter.rank else 1, 1, "an adapter was never tried on several"),
        ("rollout.colocated", config.rollout.colocated, False, "it cannot give its memory to replicas"),
        ("sampling.routing", config.sampling.routing, False, "it has no mixtures of experts"),
    )
    for key, value, only, reason in needed:
        if value != only:
            remedy = f'Set it to {as_toml(only)}, or the backend to "torch"'
            yield f"cannot do `{key}` ({as_toml(value)}): {reason}.\n  {remedy}"


RANK_MAX = 512
"""vLLM has no larger slot for an adapter."""


def why_not_native(config: Keys) -> str:
    """The first reason, with its remedy. Empty: there is none."""
    return next(_not_native(config), "")


def _not_native(config: Keys) -> Iterator[str]:
    adapter, rollout = config.adapter, config.rollout
    if adapter.rank is None:
        yield 'needs an adapter, and `adapter.rank` is "none".\n  Set it to 8, or leave this out'
    elif adapter.rank > RANK_MAX:
        yield f"has ranks up to {RANK_MAX}, and `adapter.rank` is {adapter.rank}.\n  Lower it"
    if adapter.kind != "lora":
        yield (
            f'has no DoRA magnitudes, and `adapter.kind` is "{adapter.kind}".\n'
            '  Set it to "lora", or leave this out: adapters are merged then'
        )
    if rollout.tensor > 1:
        yield f"has one device, and `rollout.tensor` is {rollout.tensor}.\n  Set it to 1"
    if rollout.quantization is not None:
        yield (
            "was not tried beside rounded weights, and `rollout.quantization` is "
            f'"{rollout.quantization}".\n  Leave one of them out'
        )
    if rollout.colocated:
        yield (
            "keeps the base weights in memory, and with `rollout.colocated` (true) they are dropped each "
            "turn.\n  Leave one of them out"
        )


def why_not_colocated(config: Keys) -> str:
    """The first reason, with its remedy. Empty: there is none."""
    return next(_not_colocated(config), "")


def _not_colocated(config: Keys) -> Iterator[str]:
    bound, kind, servers = config.staleness_bound, config.schedule.kind, config.rollout.servers
    if bound not in (0, 1):
        yield (
            f'trains what is at most 1 version old, and `schedule.kind` ("{kind}") has the staleness bound '
            f"{'none' if bound is None else bound}: on one device generation runs no further ahead.\n"
            '  Set it to "synchronous", or to "areal" with `schedule.eta` = 1'
        )
    if bound == 1 and not isinstance(config.schedule, LlamaRL | AReaL):
        yield (
            f'keeps trajectories over the turn of the trainer, and under `schedule.kind` ("{kind}") a '
            "trajectory has one version.\n"
            '  Set it to "areal" with `schedule.eta` = 1, or the staleness bound to 0'
        )
    if servers:
        yield (
            f"lends one device, and `rollout.servers` ({len(servers)}) have devices of their own.\n"
            "  Leave one of them out"
        )
    if config.evaluations:
        yield (
            "has no place for the evaluator of `evaluations`, which computes beside both sides.\n"
            "  Leave `evaluations` out, and evaluate checkpoints with `millrace eval`"
        )
    if config.reference_apart:
        yield (
            'has no place for `algorithm.reference` ("replica"), which computes beside both sides.\n'
            '  Set it to "trainer"'
        )
    if not isinstance(config.runtime, LocalHosts) or config.runtime.hosts > 1:
        yield (
            f'is for one host, and `runtime.kind` ("{config.runtime.kind}") has several.\n'
            '  Set it to "local", with `runtime.hosts` = 1'
        )


# ---------------------------------------------------------------- before a run starts


def refuse_start(config: Keys) -> None:
    """Raises: ConfigError: a run of this configuration cannot be what it asks for."""
    _refuse_trained_drafts(config)
    _refuse_narrow_states(config)
    if config.trainer.quantization is not None and (reason := next(_not_quantised(config), "")):
        raise ConfigError(f'`trainer.quantization` ("fp8") {reason}, or leave `trainer.quantization` out')


def unless_allowed(config: Keys, **problems: Iterable[str]) -> list[str]:
    """Those of `problems`, by their names in `allow`, that the user does not mean, each with its remedy."""
    return [
        f'{problem}, or say that you mean it: `allow = ["{name}"]`'
        for name, found in problems.items()
        if name not in config.allow
        for problem in found
    ]


def _refuse_narrow_states(config: Keys) -> None:
    if config.optimizer.states == "float32":
        return
    if config.trainer.ranks > 1:
        raise ConfigError(
            f'`optimizer.states` ("8bit") is for a trainer of one rank, and this one has '
            f"{config.trainer.ranks}: another number of ranks could not read its checkpoints.\n"
            "  Leave it at float32, which the ranks divide, or set `trainer.shard`, `trainer.tensor` and "
            "`trainer.sequence` to 1"
        )
    if config.trainer.offload:
        raise ConfigError(
            '`optimizer.states` ("8bit") cannot be offloaded: CPUs update 8-bit moments 150 times slower.\n'
            "  Leave it at float32, or set `trainer.offload` to false"
        )


def _refuse_trained_drafts(config: Keys) -> None:
    """Raises: ConfigError: the run wants a trained drafter, and has what a drafter was not written for."""
    if config.rollout.drafts == "trained" and (reason := next(_no_trained_drafts(config), "")):
        raise ConfigError(f'`rollout.drafts` ("trained") {reason}, or `rollout.drafts` to "earlier"')


def _not_quantised(config: Keys) -> Iterator[str]:
    trainer, whole = config.trainer, "rounds whole matrices once a step, in one process"
    return _unmet(
        ("model.dtype", config.model.dtype, "bfloat16", "takes the place of matrices in bfloat16"),
        ("trainer.shard", trainer.shard, 1, whole),
        ("trainer.tensor", trainer.tensor, 1, whole),
        ("trainer.sequence", trainer.sequence, 1, whole),
        ("trainer.offload", trainer.offload, False, "rounds matrices where it computes"),
        ("adapter.rank", config.adapter.rank, None, "is for trained matrices: an adapter is merged anew"),
    )


def _no_trained_drafts(config: Keys) -> Iterator[str]:
    trainer, whole = config.trainer, "trains its head in one process, with whole weights"
    return _unmet(
        ("trainer.backend", trainer.backend, "torch", "trains its head in torch"),
        ("trainer.shard", trainer.shard, 1, whole),
        ("trainer.tensor", trainer.tensor, 1, whole),
        ("trainer.sequence", trainer.sequence, 1, whole),
        ("trainer.offload", trainer.offload, False, "reads the policy's head where it computes"),
        ("adapter.rank", config.adapter.rank, None, "is published with whole weights, not with an adapter"),
        ("rollout.colocated", config.rollout.colocated, False, "is trained while the trainer would be idle"),
    )


def _unmet(*needed: tuple[str, object, object, str]) -> Iterator[str]:
    """Of each key, its value, the only value that goes, and why: those that have another value."""
    for key, value, only, why in needed:
        if value != only:
            yield f"{why}, and `{key}` is {as_toml(value)}.\n  Set it to {as_toml(only)}"


def uncorrected(config: Keys) -> Iterator[str]:
    """Tokens of other policies count as if the current policy had sampled them. Runs collapse: LlamaRL,
    arXiv:2505.24034, section 6. A quantised replica or trainer is another policy at any age."""
    algorithm, bound = config.policy_gradient, config.staleness_bound
    rounded = [
        f'{who} with rounded weights (`{key}` "{value}")'
        for who, key, value in (
            ("replicas sample", "rollout.quantization", config.rollout.quantization),
            ("the trainer computes", "trainer.quantization", config.trainer.quantization),
        )
        if value is not None
    ]
    if (bound == 0 and not rounded) or algorithm is None:
        return
    if algorithm.anchor == "behavior" or algorithm.correction is not None:
        return
    if algorithm.second_moment is not None or algorithm.drift is not None:
        return
    age = "of any age" if bound is None else f"up to {bound} versions old"
    source = rounded[0] if rounded else f'tokens are {age} (`schedule.kind` "{config.schedule.kind}")'
    yield (
        f'`algorithm.correction` ("none"): {source}, and '
        "nothing corrects for the policies that sampled them.\n  Set it to 2.0"
    )


ROUNDS_MAX = 100
"""Completions one after the other that a step may wait for."""


def oversized(config: Keys) -> Iterator[str]:
    """Warnings: batches so large that they hardly end, or a warm-up longer than the run."""
    each, slots = config.trajectories_per_step, config.rollout.replicas * config.rollout.slots
    if each > ROUNDS_MAX * slots:
        batch, tokens = config.batch, config.sampling.max_tokens
        yield (
            f"a step takes {each:,} trajectories, `batch.prompts` ({batch.prompts:,}) x `batch.group_size` "
            f"({batch.group_size:,}), and `rollout.replicas` x `rollout.slots` generate {slots:,} at a time. "
            f"A step waits for {each // slots:,} completions one after the other, of up to "
            f"`sampling.max_tokens` ({tokens:,}) tokens: lower `batch.group_size` or `batch.prompts`, to "
            f"{ROUNDS_MAX * slots:,} trajectories or fewer"
        )
    if config.optimizer.warmup_steps > config.steps:
        yield (
            f"`optimizer.warmup_steps` ({config.optimizer.warmup_steps:,}) is more than `steps` "
            f"({config.steps:,}): the learning rate never reaches `optimizer.lr`"
        )
