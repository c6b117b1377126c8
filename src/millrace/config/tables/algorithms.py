"""`[algorithm]`: a preset by name, and every part of it as a key.

The keys are orthogonal: whom a trajectory is compared with, which ratio, what a clip does with it, how data
of another policy is corrected, what a token counts for. A preset is a set of defaults and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from millrace.config.tables.section import COUNT_MAX, Section

Baseline = Literal["group", "others", "value", "none"]
Scale = Literal["std", "mean", "batch", "none"]
Select = Literal["all", "shortest", "efficient", "positive"]
Level = Literal["token", "sequence"]
Anchor = Literal["proximal", "behavior"]
Clip = Literal["ppo", "weight", "soft", "tv", "kl", "none"]
Normalize = Literal["sequence", "token", "max_tokens"]
Estimator = Literal["k1", "k2", "k3"]
Place = Literal["loss", "reward"]
Outside = Literal["clip", "drop"]

ClipLow = Annotated[float, Field(gt=0, le=1)]
ClipHigh = Annotated[float, Field(gt=0, le=100)]
Cap = Annotated[float, Field(ge=1, le=1e6)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Small = Annotated[float, Field(gt=0, le=1000)]


class PolicyGradient(Section):
    baseline: Baseline = "group"
    """What a reward is compared with. `"group"`: the mean of the group. `"others"`: the mean of its other
    trajectories. `"value"`: each token with what a critic expected before it (GAE). `"none"`: nothing."""
    scale: Scale = "std"
    """What the comparison is divided by. `"std"` or `"mean"`: that of the group's rewards. `"batch"`: less
    the mean, and divided by the standard deviation, over all trained tokens. `"none"`: nothing."""
    select: Select = "all"
    """Trajectories of a group that are compared and trained. `"shortest"`, `"efficient"` (reward per token):
    the first `keep` of them. `"positive"`: those with a reward above 0."""
    keep: int | None = Field(default=None, ge=2, le=COUNT_MAX)
    """How many `select` leaves, fewer than `batch.group_size`."""
    overlong: Fraction = 0.0
    """The last part of `sampling.max_tokens`, as a fraction, in which a growing penalty up to 1 is taken off
    the reward. 0 is off."""
    truncated: Literal["train", "mask"] = "train"
    """`"mask"`: trajectories that were cut by a budget are compared, and not trained."""
    resample: int = Field(default=0, ge=0, le=1000)
    """Groups whose rewards are all equal end as `rejected`, and others take their place: for each batch at
    most this many times `batch.prompts`. Further ones are trained, and teach nothing. 0: off. Not with
    `baseline` `"none"` or `"value"`, with `turn_discount` or a teacher: there such groups teach."""
    turn_discount: Fraction | None = None
    """Each turn of a trajectory has an advantage of its own, by the rewards `turn_1`, `turn_2`, ... that the
    reward function returned. How much what comes one turn later counts for a turn. `"none"`: all tokens have
    the advantage of the trajectory."""
    ratio: Level = "token"
    """Of which probabilities the ratio is taken. `"sequence"`: the geometric mean over the trained tokens."""
    anchor: Anchor = "proximal"
    """What the ratio divides by: the policy at the batch's beginning, or the one that sampled."""
    clip: Clip = "ppo"
    """What is done with the ratio. `"ppo"`: the pessimistic clip. `"weight"`: a constant weight between
    `rho_low` and `rho`. `"soft"`: a smooth gate. `"tv"`, `"kl"`: as `"weight"`, but tokens are left out whose
    probability has moved too far. `"none"`: the plain ratio."""
    clip_low: ClipLow = 0.2
    """`"ppo"`: the ratio's lower bound is 1 - clip_low. `"tv"`, `"kl"`: how far a bad token may fall."""
    clip_high: ClipHigh = 0.2
    """`"ppo"`: the ratio's upper bound is 1 + clip_high. `"tv"`, `"kl"`: how far a good token may rise."""
    clip_dual: Cap | None = None
    """Largest ratio of a token with a negative advantage, with `clip = "ppo"`. `"none"`: no bound."""
    rho: Cap = 4.0
    """Largest weight, with `clip` `"weight"`, `"tv"` or `"kl"`."""
    rho_low: Fraction = 0.0
    """Smallest weight, with `clip = "weight"`."""
    gate_positive: Small = 1.0
    """Steepness of the soft gate for good tokens: the larger, the sooner a ratio stops to count."""
    gate_negative: Small = 1.05
    """Steepness of the soft gate for bad tokens."""
    correction: Cap | None = 2.0
    """Cap of the importance weight proximal/behavior (TIS), at least 1. `"none"`: no weight."""
    correction_low: Fraction = 0.0
    """Smallest importance weight."""
    correction_of: Level = "token"
    """`"sequence"`: the weight is the product over the trained tokens of the sequence."""
    correction_outside: Outside = "clip"
    """What happens to weights outside [correction_low, correction]: clipped, or the tokens left out."""
    second_moment: Small | None = None
    """Largest mean square of log(proximal/behavior) over the tokens that moved as their advantage pushes
    them. Those furthest from the policy that sampled are left out. It costs a forward pass. Not with a
    teacher. `"none"`: off."""
    drift: Small | None = None
    """Sequences with a negative advantage are left out whose mean log(behavior/current) is more than this.
    `"none"`: off."""
    normalize: Normalize = "token"
    """`"token"`: mean over all tokens (DAPO). `"sequence"`: mean per sequence, then over sequences (GRPO).
    `"max_tokens"`: sum over all tokens, divided by sequences x `sampling.max_tokens` (Dr. GRPO). With each
    of them a prompt that lost trajectories, because their reward failed, counts less than a whole one."""
    kl: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the KL penalty towards the initial model."""
    kl_estimator: Estimator = "k3"
    """How the KL of a token is estimated."""
    kl_in: Place = "loss"
    """`"reward"`: the penalty of a trajectory's tokens is taken off its reward. It costs a forward pass."""
    reference: Literal["trainer", "replica"] = "trainer"
    """Who keeps the initial model for the KL penalty. `"trainer"`: a frozen copy there; with `[adapter]` the
    model itself. `"replica"`: a process of its own, so that the trainer holds one model."""
    entropy: float = Field(default=0.0, ge=0, le=1000)
    """Weight of an entropy bonus."""
    teacher: str | None = None
    """Model directory of a teacher with the same tokens. What it thinks of each token is a part of the
    advantage: `teacher_weight` x log(teacher/proximal). `"none"`: no teacher."""
    teacher_weight: float = Field(default=1.0, gt=0, le=1000)
    """Weight of the teacher in the advantage."""
    reward_weight: float = Field(default=1.0, ge=0, le=1000)
    """Weight of the rewards beside a teacher. 0: on-policy distillation alone."""
    discount: Fraction = 1.0
    """How much a reward counts one token earlier, with `baseline = "value"`."""
    gae_lambda: Fraction = 0.95
    """How far an advantage looks beyond the critic's next value. 1: to the end. 0: not at all."""
    value_lr: float = Field(default=0.03, gt=0, le=1)
    """Learning rate of the critic, a linear head on the trained model: about how far values move in a
    step."""
    value_trunk: float = Field(default=0.0, ge=0, le=1000)
    """How much of the critic's gradient goes on into the model. 0: the head alone learns."""
    value_clip: Small | None = None
    """How far a value may move in the steps of a batch before its loss stops to count. `"none"`: anywhere."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Where a batch gets several optimizer steps: the policy at its beginning, by a forward pass, or by
    interpolation between the policy that sampled and the current one (A-3PO)."""

    @classmethod
    def __pydantic_init_subclass__(cls, **unused: Any) -> None:
        """What a preset changes means what it means here."""
        for name, field in cls.model_fields.items():
            if name in PolicyGradient.model_fields and field.description is None:
                field.description = PolicyGradient.model_fields[name].description

    @model_validator(mode="after")
    def _sound(self) -> PolicyGradient:
        for wrong, message in (*_contradictions(self), *_of_teacher(self)):
            if wrong:
                raise ValueError(message)
        return self


def _contradictions(a: PolicyGradient) -> Iterator[tuple[bool, str]]:
    """Settings that mean nothing together: whether they are there, and by name what to do."""
    yield (
        a.anchor == "behavior" and a.correction is not None,
        f"`algorithm.correction` ({a.correction}) is for the ratio to the proximal policy, and "
        '`algorithm.anchor` ("behavior") takes the one to the policy that sampled.\n'
        '  Set `algorithm.correction` to "none"',
    )
    yield (
        a.correction is None and a.correction_low > 0,
        f'`algorithm.correction_low` ({a.correction_low}) needs `algorithm.correction`, which is "none".\n'
        "  Set the upper bound too",
    )
    yield (
        a.baseline in ("none", "value") and a.scale in ("std", "mean"),
        f'`algorithm.scale` ("{a.scale}") is for rewards that are compared, and `algorithm.baseline` is '
        f'"{a.baseline}".\n  Set the scale to "batch" or "none"',
    )
    yield (
        a.turn_discount is not None and a.baseline == "value",
        f"`algorithm.turn_discount` ({_shown(a.turn_discount)}) compares turns within a group, and "
        '`algorithm.baseline` ("value") compares tokens with a critic.\n  Set one of them to "none"',
    )
    yield (
        (a.select in ("shortest", "efficient")) != (a.keep is not None),
        f'`algorithm.keep` ({_shown(a.keep)}) and `algorithm.select` ("{a.select}") do not belong together.\n'
        '  Set `keep` with "shortest" or "efficient", and "none" otherwise',
    )
    yield (
        a.resample > 0 and (a.baseline in ("none", "value") or a.teacher is not None),
        f"`algorithm.resample` ({a.resample}) replaces groups whose rewards are all equal, and "
        f'`algorithm.baseline` ("{a.baseline}") with `algorithm.teacher` ({_shown(a.teacher)}) learns from '
        "them.\n  Set `resample` to 0",
    )
    yield (
        a.resample > 0 and a.turn_discount is not None,
        f"`algorithm.resample` ({a.resample}) replaces groups whose rewards are all equal, and with "
        f"`algorithm.turn_discount` ({_shown(a.turn_discount)}) rewards of their turns teach.\n"
        "  Set `resample` to 0",
    )
    yield (
        a.clip_dual is not None and (a.clip != "ppo" or a.clip_dual <= 1 + a.clip_high),
        f'`algorithm.clip_dual` ({_shown(a.clip_dual)}) is for `algorithm.clip` "ppo" (here: "{a.clip}"), '
        f"and must be more than 1 + `algorithm.clip_high` ({a.clip_high})",
    )
    yield (
        a.ratio == "sequence" and a.clip in ("tv", "kl"),
        f'`algorithm.ratio` ("sequence"): `algorithm.clip` "{a.clip}" looks at the probability of a token.\n'
        '  Set the ratio to "token"',
    )
    yield (
        a.kl > 0 and a.kl_estimator == "k1" and a.kl_in == "loss",
        '`algorithm.kl_estimator` ("k1") in the loss (`algorithm.kl_in`) has a gradient whose mean is 0.\n'
        '  Set the estimator to "k2" or "k3", or `algorithm.kl_in` to "reward"',
    )


def _of_teacher(a: PolicyGradient) -> Iterator[tuple[bool, str]]:
    yield (
        a.teacher is not None and a.kl > 0,
        f"`algorithm.kl` ({a.kl}) keeps the policy near the initial model, and `algorithm.teacher` takes it "
        "to another.\n  Set `kl` to 0, or leave the teacher out",
    )
    yield (
        a.teacher is not None and a.second_moment is not None,
        f"`algorithm.second_moment` ({_shown(a.second_moment)}) looks at advantages before the first step, "
        "and what `algorithm.teacher` adds to them is not known there.\n  Leave one of them out",
    )
    yield (
        a.teacher is None and a.reward_weight != 1,
        f"`algorithm.reward_weight` ({a.reward_weight}) is for the rewards beside `algorithm.teacher`, which "
        'is "none".\n  Name a teacher, or leave the weight out',
    )


def _shown(value: float | str | None) -> str:
    return '"none"' if value is None else str(value)


class GRPO(PolicyGradient):
    kind: Literal["grpo"] = "grpo"


class DrGRPO(PolicyGradient):
    kind: Literal["dr_grpo"] = "dr_grpo"
    scale: Scale = "none"
    normalize: Normalize = "max_tokens"


class DAPO(PolicyGradient):
    kind: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28
    overlong: Fraction = 0.2
    resample: int = Field(default=10, ge=0, le=1000)


class RLOO(PolicyGradient):
    kind: Literal["rloo"] = "rloo"
    baseline: Baseline = "others"
    scale: Scale = "none"
    clip: Clip = "none"
    normalize: Normalize = "max_tokens"


class Reinforce(PolicyGradient):
    kind: Literal["reinforce"] = "reinforce"
    baseline: Baseline = "none"
    scale: Scale = "none"
    clip: Clip = "none"
    normalize: Normalize = "max_tokens"


class ReinforcePlusPlus(PolicyGradient):
    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Baseline = "none"
    scale: Scale = "batch"
    kl_estimator: Estimator = "k1"
    kl_in: Place = "reward"


class PPO(PolicyGradient):
    kind: Literal["ppo"] = "ppo"
    baseline: Baseline = "value"
    scale: Scale = "batch"
    value_clip: Small | None = 0.2


class MaxRL(PolicyGradient):
    kind: Literal["max_rl"] = "max_rl"
    scale: Scale = "mean"


class MTGRPO(PolicyGradient):
    kind: Literal["mt_grpo"] = "mt_grpo"
    turn_discount: Fraction | None = 1.0


class GFPO(PolicyGradient):
    kind: Literal["gfpo"] = "gfpo"
    select: Select = "shortest"
    keep: Annotated[int, Field(ge=2, le=COUNT_MAX)] | None = 4


class RAFT(PolicyGradient):
    kind: Literal["raft"] = "raft"
    baseline: Baseline = "none"
    scale: Scale = "none"
    select: Select = "positive"
    clip: Clip = "none"


class AIPO(PolicyGradient):
    kind: Literal["aipo"] = "aipo"
    scale: Scale = "none"
    anchor: Anchor = "behavior"
    clip: Clip = "weight"
    correction: Cap | None = None


class Decoupled(PolicyGradient):
    kind: Literal["decoupled"] = "decoupled"
    correction: Cap | None = 5.0


class Bypass(PolicyGradient):
    kind: Literal["bypass"] = "bypass"
    anchor: Anchor = "behavior"
    correction: Cap | None = None


class SequenceTIS(PolicyGradient):
    kind: Literal["sequence_tis"] = "sequence_tis"
    correction: Cap | None = 5.0
    correction_of: Level = "sequence"


class IcePop(PolicyGradient):
    kind: Literal["icepop"] = "icepop"
    correction: Cap | None = 5.0
    correction_low: Fraction = 0.5
    correction_outside: Outside = "drop"


class CISPO(PolicyGradient):
    kind: Literal["cispo"] = "cispo"
    anchor: Anchor = "behavior"
    clip: Clip = "weight"
    rho: Cap = 5.0
    correction: Cap | None = None


class GSPO(PolicyGradient):
    kind: Literal["gspo"] = "gspo"
    ratio: Level = "sequence"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    normalize: Normalize = "sequence"


class M2PO(PolicyGradient):
    kind: Literal["m2po"] = "m2po"
    anchor: Anchor = "behavior"
    clip: Clip = "none"
    correction: Cap | None = None
    second_moment: Small | None = 0.04


class DPPOTV(PolicyGradient):
    kind: Literal["dppo_tv"] = "dppo_tv"
    anchor: Anchor = "behavior"
    clip: Clip = "tv"
    clip_low: ClipLow = 0.15
    clip_high: ClipHigh = 0.15
    rho: Cap = 20.0
    correction: Cap | None = None


class DPPOKL(PolicyGradient):
    kind: Literal["dppo_kl"] = "dppo_kl"
    anchor: Anchor = "behavior"
    clip: Clip = "kl"
    clip_low: ClipLow = 0.05
    clip_high: ClipHigh = 0.05
    rho: Cap = 20.0
    correction: Cap | None = None


class SAPO(PolicyGradient):
    kind: Literal["sapo"] = "sapo"
    clip: Clip = "soft"
    normalize: Normalize = "sequence"


class TwoSided(PolicyGradient):
    kind: Literal["two_sided"] = "two_sided"
    anchor: Anchor = "behavior"
    clip_dual: Cap | None = 4.0
    correction: Cap | None = None


class DeepSeekV32(PolicyGradient):
    kind: Literal["deepseek_v32"] = "deepseek_v32"
    scale: Scale = "none"
    anchor: Anchor = "behavior"
    correction: Cap | None = None
    drift: Small | None = 0.1
    normalize: Normalize = "sequence"


class FunctionAlgorithm(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a `millrace.algorithms.Algorithm`. See
    examples/algorithm.py."""


Algorithm = Annotated[
    GRPO
    | DrGRPO
    | DAPO
    | RLOO
    | Reinforce
    | ReinforcePlusPlus
    | PPO
    | MaxRL
    | MTGRPO
    | GFPO
    | RAFT
    | AIPO
    | Decoupled
    | Bypass
    | SequenceTIS
    | IcePop
    | CISPO
    | GSPO
    | M2PO
    | DPPOTV
    | DPPOKL
    | SAPO
    | TwoSided
    | DeepSeekV32
    | FunctionAlgorithm,
    Field(discriminator="kind"),
]
