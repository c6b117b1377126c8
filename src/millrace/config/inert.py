"""Keys that have no effect in a run. Pure.

A clip acts on a ratio of two policies. If the two policies are the same, the ratio is 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.schema import Config
from millrace.config.tables.algorithms import PRESETS, PolicyGradient
from millrace.config.tables.section import Section


def inert(config: Config) -> list[str]:
    """Describes the keys without effect in a run of `config`, the reason, and the key that gives them an
    effect. A default that neither the configuration nor the preset sets is none of them.

    Degenerate:
        An algorithm of one's own -> nothing is known of it: empty.
    """
    algorithm = config.algorithm
    return list(_inert(config, algorithm)) if isinstance(algorithm, PolicyGradient) else []


def _inert(config: Config, a: PolicyGradient) -> Iterator[str]:
    one, on_policy = config.batch.minibatches * config.batch.epochs == 1, config.staleness_bound == 0
    chosen = a.model_fields_set | PRESETS[a.kind].defaults.keys()
    of_ratio = [f'`algorithm.ratio` ("{a.ratio}")'] if a.ratio == "sequence" else []
    of_ratio += [f'`algorithm.clip` ("{a.clip}")'] if a.clip != "none" and "clip" in chosen else []
    several = "Set `batch.minibatches` to 2 or more"
    if one and of_ratio and a.anchor == "proximal":
        yield (
            f"{_named(of_ratio)} nothing: a batch gets one optimizer step, in which the ratio to the policy "
            f"at the batch's beginning is 1. {several}{'' if on_policy else _or_to_behavior(a)}"
        )
    if one and a.baseline == "value" and a.value_clip is not None:
        clip = f"`algorithm.value_clip` ({a.value_clip:g})"
        yield f"{_named([clip])} nothing: no value moves before a batch's one optimizer step. {several}"
    if a.sequence_share > 0 and config.reward.kind != "environment":
        share = f"`algorithm.sequence_share` ({a.sequence_share:g})"
        yield f'{_named([share])} nothing: several sequences need `reward.kind` "environment"'
    if not on_policy:
        return
    of_age = of_ratio if one and a.anchor == "behavior" else []
    of_age += [f"`algorithm.drift` ({a.drift:g})"] if one and a.drift is not None else []
    none_older = "the policy that sampled is the one that is trained, but for rounding"
    if of_age:
        yield f"{_named(of_age)} nothing: {none_older}. {several}, or choose an asynchronous `schedule.kind`"
    if a.second_moment is not None:
        second = f"`algorithm.second_moment` ({a.second_moment:g})"
        yield f"{_named([second])} nothing: {none_older}. Choose an asynchronous `schedule.kind`"


def _or_to_behavior(a: PolicyGradient) -> str:
    """What an asynchronous run has instead, and the key that makes the ratio that to the sampling policy."""
    without = "" if a.correction is None else ' and `algorithm.correction` to "none"'
    remedy = f', or `algorithm.anchor` to "behavior"{without}'
    if a.ratio == "token" or a.correction is None or a.correction_of == "sequence":
        return remedy
    kept = (
        f"tokens of older policies count by `algorithm.correction` ({a.correction:g}), each by its own ratio"
    )
    return f"{remedy}. As it is, {kept}"


def _named(keys: list[str]) -> str:
    return f"{' and '.join(keys)} change{'s' if len(keys) == 1 else ''}"


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
