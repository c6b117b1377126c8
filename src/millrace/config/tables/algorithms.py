"""`[algorithm]`: a preset by name, and every choice of an algorithm as a key.

The keys are orthogonal: the baseline of a reward, the ratio, its clip, the correction for data of another
policy, the weight of a token. A preset is a set of defaults and nothing else: a row of `PRESETS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from millrace.config.tables.section import COUNT_MAX, Section

Level = Literal["token", "sequence"]
Cap = Annotated[float, Field(ge=1, le=1e6)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Small = Annotated[float, Field(gt=0, le=1000)]
Weight = Annotated[float, Field(ge=0, le=1000)]


@dataclass(frozen=True)
class Preset:
    """A named set of defaults of `[algorithm]`.

    meaning   one line for the reference
    source    where the algorithm is from: an arXiv number, or author and year
    defaults  keys with a default that differs from `PolicyGradient`
    """

    meaning: str
    source: str
    defaults: dict[str, Any] = field(default_factory=dict)


BEHAVIOR = {"anchor": "behavior", "correction": None}
"""The ratio to the policy that sampled corrects for staleness itself."""

PRESETS = {
    "grpo": Preset("GRPO: rewards compared within a group, PPO's clip", "2402.03300"),
    "dr_grpo": Preset(
        "Dr. GRPO: GRPO without division by deviation and length",
        "2503.20783",
        {"scale": "none", "normalize": "max_tokens"},
    ),
    "dapo": Preset(
        "DAPO: a higher upper clip, overlong penalty, dynamic sampling",
        "2503.14476",
        {"clip_high": 0.28, "overlong": 0.2, "resample": 10},
    ),
    "rloo": Preset(
        "RLOO: REINFORCE with the mean of the other trajectories as the baseline",
        "2402.14740",
        {"baseline": "others", "scale": "none", "clip": "none", "normalize": "max_tokens"},
    ),
    "reinforce": Preset(
        "REINFORCE without a baseline",
        "Williams 1992",
        {"baseline": "none", "scale": "none", "clip": "none", "normalize": "max_tokens"},
    ),
    "reinforce_pp": Preset(
        "REINFORCE++: rewards whitened over the batch, KL in the reward",
        "2501.03262",
        {"baseline": "none", "scale": "batch", "kl_estimator": "k1", "kl_in": "reward"},
    ),
    "ppo": Preset(
        "PPO with a critic and GAE",
        "1707.06347, 1506.02438",
        {"baseline": "value", "scale": "batch", "value_clip": 0.2},
    ),
    "max_rl": Preset("MaxRL: advantages divided by the mean reward", "2602.02710", {"scale": "mean"}),
    "mt_grpo": Preset("MT-GRPO: an advantage for each turn", "2505.11821", {"turn_discount": 1.0}),
    "gfpo": Preset(
        "GFPO: only the shortest trajectories are trained", "2508.09726", {"select": "shortest", "keep": 4}
    ),
    "raft": Preset(
        "RAFT: only trajectories with a positive reward are trained",
        "2304.06767, 2504.11343",
        {"baseline": "none", "scale": "none", "select": "positive", "clip": "none"},
    ),
    "aipo": Preset(
        "AIPO: a truncated ratio as the weight, no division by the deviation",
        "2505.24034",
        {**BEHAVIOR, "scale": "none", "clip": "weight"},
    ),
    "decoupled": Preset(
        "Decoupled PPO of AReaL: a larger cap of the importance weight", "2505.24298", {"correction": 5.0}
    ),
    "bypass": Preset("PPO's clip to the policy that sampled", "1707.06347", BEHAVIOR),
    "sequence_tis": Preset(
        "A truncated importance weight of the whole sequence",
        "1802.01561",
        {"correction": 5.0, "correction_of": "sequence"},
    ),
    "icepop": Preset(
        "IcePop: tokens with an extreme importance weight are masked",
        "2510.18855",
        {"correction": 5.0, "correction_low": 0.5, "correction_outside": "drop"},
    ),
    "cispo": Preset(
        "CISPO: a truncated ratio as the weight", "2506.13585", {**BEHAVIOR, "clip": "weight", "rho": 5.0}
    ),
    "gspo": Preset(
        "GSPO: a ratio of the whole sequence",
        "2507.18071",
        {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "normalize": "sequence"},
    ),
    "m2po": Preset(
        "M2PO: a mask by the second moment of log ratios",
        "2510.01161",
        {**BEHAVIOR, "clip": "none", "second_moment": 0.04},
    ),
    "dppo_tv": Preset(
        "DPPO: a mask by total variation",
        "2602.04879",
        {**BEHAVIOR, "clip": "tv", "clip_low": 0.15, "clip_high": 0.15, "rho": 20.0},
    ),
    "dppo_kl": Preset(
        "DPPO: a mask by KL divergence",
        "2602.04879",
        {**BEHAVIOR, "clip": "kl", "clip_low": 0.05, "clip_high": 0.05, "rho": 20.0},
    ),
    "sapo": Preset(
        "SAPO: a soft gate in place of a clip", "2511.20347", {"clip": "soft", "normalize": "sequence"}
    ),
    "two_sided": Preset("The two-sided clip of INTELLECT-2", "2505.07291", {**BEHAVIOR, "clip_dual": 4.0}),
    "deepseek_v32": Preset(
        "DeepSeek-V3.2: drifted sequences with a negative advantage are masked",
        "2512.02556",
        {**BEHAVIOR, "scale": "none", "drift": 0.1, "normalize": "sequence"},
    ),
}
"""The presets by name, in the order of the reference."""


class PolicyGradient(Section):
    kind: Literal[tuple(PRESETS)] = "grpo"  # type: ignore[valid-type]
    """Keys that the configuration leaves out have the preset's defaults, which the next table has."""
    baseline: Literal["group", "others", "value", "none"] = "group"
    """The baseline of a reward. `"group"`: the mean of the group. `"others"`: the mean of the group's other
    trajectories. `"value"`: a critic's value before each token (GAE). `"none"`: 0."""
    scale: Literal["std", "mean", "batch", "none"] = "std"
    """The divisor of an advantage. `"std"`, `"mean"`: the standard deviation or the mean of the group's
    rewards. `"batch"`: advantages are whitened over all trained tokens of the batch. `"none"`: 1."""
    select: Literal["all", "shortest", "efficient", "positive"] = "all"
    """The trajectories of a group that are compared and trained. `"shortest"`: the `keep` shortest.
    `"efficient"`: the `keep` with the most reward per token. `"positive"`: those with a reward above 0."""
    keep: int | None = Field(default=None, ge=2, le=COUNT_MAX)
    """Number of trajectories that `select` keeps, less than `batch.group_size`."""
    overlong: Fraction = 0.0
    """Overlong penalty: a penalty on the reward grows from 0 to 1 over the last part of
    `sampling.max_tokens`. The value is the size of this part, as a fraction. 0: no penalty."""
    truncated: Literal["train", "mask"] = "train"
    """`"mask"`: truncated trajectories count in the baseline and are not trained."""
    resample: int = Field(default=0, ge=0, le=1000)
    """Dynamic sampling: groups with equal rewards end as `rejected`, and other groups take their place. For
    each batch at most this many times `batch.prompts` groups are replaced. Further groups with equal rewards
    are trained, with advantages of 0. 0: no replacement. Not with `baseline` `"none"` or `"value"`, with
    `turn_discount`, `sequence_share` or a teacher, because groups with equal rewards teach there."""
    turn_discount: Fraction | None = None
    """Each turn of a trajectory has its own advantage, from the rewards `turn_1`, `turn_2`, ... that the
    reward function returns. The value is the discount of the next turn's reward (gamma). `"none"`: all tokens
    have the advantage of the trajectory."""
    sequence_share: Fraction = 0.0
    """Share of a sequence's own reward in the advantage of its tokens, where an environment's answers begin
    several sequences in a trajectory. 0: all tokens have the advantage of the trajectory."""
    ratio: Level = "token"
    """The level of the probability ratio. `"token"`: each token has its own ratio. `"sequence"`: the
    geometric mean of the ratios of the sequence's trained tokens."""
    anchor: Literal["proximal", "behavior"] = "proximal"
    """The policy in the denominator of the ratio. `"proximal"`: the policy at the beginning of the batch.
    `"behavior"`: the policy that sampled the token."""
    clip: Literal["ppo", "weight", "soft", "tv", "kl", "none"] = "ppo"
    """What the objective does with the ratio. `"ppo"`: PPO's clip. `"weight"`: the ratio becomes a constant
    weight between `rho_low` and `rho`. `"soft"`: a smooth gate. `"tv"`, `"kl"`: a weight, and tokens whose
    probability moved too far are masked. `"none"`: the plain ratio."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """`"ppo"`: the ratio's lower bound is 1 - `clip_low`. `"tv"`, `"kl"`: the largest divergence of a token
    with a negative advantage."""
    clip_high: Annotated[float, Field(gt=0, le=100)] = 0.2
    """`"ppo"`: the ratio's upper bound is 1 + `clip_high`. `"tv"`, `"kl"`: the largest divergence of a token
    with a positive advantage."""
    clip_dual: Cap | None = None
    """`"ppo"`: the largest ratio of a token with a negative advantage (dual clip). `"none"`: no bound."""
    rho: Cap = 4.0
    """The largest weight, with `clip` `"weight"`, `"tv"` or `"kl"`."""
    rho_low: Fraction = 0.0
    """The smallest weight, with `clip = "weight"`."""
    gate_positive: Small = 1.0
    """Steepness of the soft gate for tokens with a positive advantage. A steeper gate fades sooner."""
    gate_negative: Small = 1.05
    """Steepness of the soft gate for tokens with a negative advantage."""
    correction: Cap | None = 2.0
    """Cap of the importance weight proximal/behavior (TIS). `"none"`: no weight."""
    correction_low: Fraction = 0.0
    """The smallest importance weight."""
    correction_of: Level = "token"
    """The level of the importance weight. `"sequence"`: the product over the sequence's trained tokens."""
    correction_outside: Literal["clip", "drop"] = "clip"
    """What happens to a weight outside [`correction_low`, `correction`]. `"clip"`: the weight is clipped.
    `"drop"`: the token is masked."""
    second_moment: Small | None = None
    """Largest mean square of log(proximal/behavior), over the tokens that moved in the direction of their
    advantage. The tokens that moved furthest are masked. This costs a forward pass. Not with a teacher.
    `"none"`: no mask."""
    drift: Small | None = None
    """A sequence with a negative advantage is masked if its mean log(behavior/current) is more than this.
    `"none"`: no mask."""
    normalize: Literal["sequence", "token", "max_tokens"] = "token"
    """`"token"`: mean over all tokens (DAPO). `"sequence"`: mean over each sequence, then over sequences
    (GRPO). `"max_tokens"`: sum over all tokens, divided by sequences x `sampling.max_tokens` (Dr. GRPO). A
    prompt counts less if the rewards of some of its trajectories failed."""
    kl: Weight = 0.0
    """Weight of the KL penalty towards the initial model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL of a token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty counts. `"reward"`: the reward is reduced by the penalty of all tokens of the
    trajectory. This costs a forward pass."""
    reference: Literal["trainer", "replica"] = "trainer"
    """The process that holds the initial model for the KL penalty. `"trainer"`: the trainer holds a frozen
    copy. With `[adapter]` the trainer needs no copy. `"replica"`: a process of its own, so the trainer holds
    one model."""
    entropy: Weight = 0.0
    """Weight of an entropy bonus."""
    teacher: str | None = None
    """Model directory of a teacher with the same tokenizer. The advantage of each token grows by
    `teacher_weight` x log(teacher/proximal). `"none"`: no teacher."""
    teacher_weight: float = Field(default=1.0, gt=0, le=1000)
    """Weight of the teacher in the advantage."""
    reward_weight: Weight = 1.0
    """Weight of the rewards in the advantage, with a teacher. 0: on-policy distillation alone."""
    discount: Fraction = 1.0
    """Discount of the next token's reward (gamma), with `baseline = "value"`."""
    gae_lambda: Fraction = 0.95
    """Lambda of GAE. 0: the advantage uses the critic's next value alone. 1: all rewards to the end."""
    value_lr: float = Field(default=0.03, gt=0, le=1)
    """Learning rate of the critic, a linear head on the trained model. Values move by about this much in an
    optimizer step."""
    value_trunk: Weight = 0.0
    """Share of the critic's gradient that flows into the model. 0: the critic trains its head alone."""
    value_clip: Small | None = None
    """Value clip of PPO: a value moves at most this far in the optimizer steps of a batch. `"none"`: no
    clip."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """The source of the proximal policy, if a batch gets several optimizer steps. `"recompute"`: a forward
    pass. `"interpolate"`: interpolation between the policy that sampled and the current policy (A-3PO)."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether a group whose rewards are all equal teaches something."""
        uncompared = self.baseline in ("none", "value")
        by_part = self.turn_discount is not None or self.sequence_share > 0
        return uncompared or self.teacher is not None or by_part

    @classmethod
    def default_of(cls, kind: str, key: str) -> Any:
        """The value of a key that a configuration of this kind leaves out."""
        return PRESETS[kind].defaults.get(key, cls.model_fields[key].default)

    @model_validator(mode="after")
    def _complete(self) -> PolicyGradient:
        """Complete the section from its preset, and refuse contradictions.

        The preset's defaults are not validated, and do not count as set: `merge` would take them for the
        user's.
        """
        for key in PRESETS[self.kind].defaults.keys() - self.model_fields_set:
            object.__setattr__(self, key, self.default_of(self.kind, key))
        for wrong, message in (*_contradictions(self), *_of_parts(self), *_of_teacher(self)):
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


def _of_parts(a: PolicyGradient) -> Iterator[tuple[bool, str]]:
    """Of advantages of turns and of sequences."""
    turns = f"`algorithm.turn_discount` ({_shown(a.turn_discount)})"
    share = f"`algorithm.sequence_share` ({a.sequence_share:g})"
    part, unit = (turns, "turns") if a.turn_discount is not None else (share, "sequences")
    by_part = a.turn_discount is not None or a.sequence_share > 0
    yield (
        a.turn_discount is not None and a.sequence_share > 0,
        f"{turns} and {share} give the same tokens different advantages.\n"
        '  Set `turn_discount` to "none", or `sequence_share` to 0',
    )
    yield (
        by_part and a.baseline == "value",
        f'{part} compares {unit} within a group, and `algorithm.baseline` ("value") compares tokens with a '
        "critic.\n  Leave one of them out",
    )
    yield (
        by_part and a.resample > 0,
        f"`algorithm.resample` ({a.resample}) replaces groups whose rewards are all equal, and with {part} "
        f"rewards of their {unit} teach.\n  Set `resample` to 0",
    )
    off = {"overlong": a.overlong, "kl": a.kl if a.kl_in == "reward" else 0.0}
    key = next((key for key, value in off.items() if value), "")
    yield (
        a.sequence_share > 0 and bool(key),
        f"`algorithm.{key}` ({off.get(key)}) is taken off the reward of a trajectory, and {share} divides "
        f"the reward among sequences.\n  Set `algorithm.{key}` to 0, or leave `sequence_share` out",
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


class FunctionAlgorithm(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a `millrace.algorithms.Algorithm`. See
    examples/algorithm.py."""


Algorithm = Annotated[PolicyGradient | FunctionAlgorithm, Field(discriminator="kind")]
