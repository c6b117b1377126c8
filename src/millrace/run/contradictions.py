"""Contradictions between the keys of a configuration, where each key alone is right. Pure.

A user who means a contradiction names it in `allow`.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.schema import Config
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.generation import SamplingConfig
from millrace.config.tables.section import Section
from millrace.rollout.engine_kinds import CUTS, knows_token_masks
from millrace.tasks.families import false_positives


def contradictions(config: Config) -> list[str]:
    """Every contradiction that `allow` does not name, with its remedy. Empty: none."""
    return [
        f'{problem}, or say that you mean it: `allow = ["{name}"]`'
        for name, problem in (*_uncorrected(config), *_cut_sampling(config), *_false_positives(config))
        if name not in config.allow
    ]


def _false_positives(config: Config) -> Iterator[tuple[str, str]]:
    for problem in false_positives(config):
        yield "false_positives", problem


def idle(config: Config) -> list[str]:
    """Keys that were set and change nothing, one sentence each."""
    unread: list[tuple[str, Section, str]] = []
    if config.adapter.rank is None:
        unused = "kind", "alpha", "targets"
        unread += [(f"adapter.{key}", config.adapter, "`adapter.rank`") for key in unused]
    if config.optimizer.decay == "constant":
        unread.append(("optimizer.lr_end", config.optimizer, "another `optimizer.decay`"))
    rollout = config.rollout
    if rollout.drafts is None:
        unread += [
            (f"rollout.{key}", rollout, "`rollout.drafts`") for key in ("draft_tokens", "draft_rows_max")
        ]
    if rollout.drafts != "eagle":
        unread.append(("rollout.draft_model", rollout, '`rollout.drafts` "eagle"'))
    if isinstance(config.algorithm, PolicyGradient):
        several = config.batch.minibatches * config.batch.epochs > 1
        unread += [
            (f"algorithm.{key}", config.algorithm, needed)
            for key, needed in _unread(config.algorithm, several=several)
        ]
    return [
        f"`{key}` ({value}) changes nothing: it needs {needed}"
        for key, section, needed in unread
        if (value := getattr(section, name := key.partition(".")[2])) != _default(section, name)
    ]


def _default(section: Section, name: str) -> object:
    if isinstance(section, PolicyGradient):
        return section.default_of(section.kind, name)
    return type(section).model_fields[name].default


def _unread(a: PolicyGradient, *, several: bool) -> Iterator[tuple[str, str]]:
    """Keys that the algorithm does not read, and the setting that would make it read them."""
    readers = {
        "clip_low clip_high": (a.clip in ("ppo", "tv", "kl"), '`algorithm.clip` "ppo", "tv" or "kl"'),
        "rho": (a.clip in ("weight", "tv", "kl"), '`algorithm.clip` "weight", "tv" or "kl"'),
        "rho_low": (a.clip == "weight", '`algorithm.clip` "weight"'),
        "gate_positive gate_negative": (a.clip == "soft", '`algorithm.clip` "soft"'),
        "correction_of correction_outside": (a.correction is not None, "`algorithm.correction`"),
        "kl_estimator kl_in reference": (a.kl > 0, "`algorithm.kl` above 0"),
        "teacher_weight": (a.teacher is not None, "`algorithm.teacher`"),
        "discount gae_lambda value_lr value_trunk value_clip": (
            a.baseline == "value",
            '`algorithm.baseline` "value"',
        ),
        "proximal": (several, "`batch.minibatches` or `batch.epochs` above 1"),
    }
    for keys, (read, needed) in readers.items():
        yield from ((key, needed) for key in keys.split() if not read)


def _uncorrected(config: Config) -> Iterator[tuple[str, str]]:
    """Tokens of other policies count as if the current policy had sampled them. Runs collapse: LlamaRL,
    arXiv:2505.24034, section 6. A quantised replica is another policy at any age."""
    algorithm, bound, rounded = config.algorithm, config.staleness_bound, config.rollout.quantization
    if (bound == 0 and rounded is None) or not isinstance(algorithm, PolicyGradient):
        return
    if algorithm.anchor == "behavior" or algorithm.correction is not None:
        return
    if algorithm.second_moment is not None or algorithm.drift is not None:
        return
    age = "of any age" if bound is None else f"up to {bound} versions old"
    source = f'tokens are {age} (`schedule.kind` "{config.schedule.kind}")'
    if rounded is not None:
        source = f'replicas sample with rounded weights (`rollout.quantization` "{rounded}")'
    yield (
        "uncorrected",
        f'`algorithm.correction` ("none"): {source}, and '
        "nothing corrects for the policies that sampled them.\n  Set it to 2.0",
    )


def _cut_sampling(config: Config) -> Iterator[tuple[str, str]]:
    """The trainer gives probability to tokens that the engine never samples, so sampled tokens seem less
    likely than they were. Token masks of the engine prevent this."""
    sampling, engine = config.sampling, config.rollout.engine
    plain = SamplingConfig()
    named = [
        f"`sampling.{key}` ({getattr(sampling, key)})"
        for key in sorted(CUTS)
        if getattr(sampling, key) != getattr(plain, key)
    ]
    if not named or knows_token_masks(config):
        return
    reason, remedy = (
        f'`rollout.engine` ("{engine}") does not record which',
        '`rollout.engine` to "own"',
    )
    if not sampling.token_masks:
        reason, remedy = "`sampling.token_masks` is false", "`sampling.token_masks` to true"
    yield (
        "cut_sampling",
        f"{' and '.join(named)}: the engine samples from some of the tokens, and the trainer counts all: "
        f"{reason}. So their ratio is not 1, even on-policy (docs/models.md).\n"
        f"  Set {remedy}, or `top_p` to 1, `top_k` and `min_p` to 0",
    )
