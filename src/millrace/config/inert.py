"""Keys of an algorithm that have no effect in a run. Pure.

A clip acts on a ratio of two policies. If the two policies are the same, the ratio is 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.schema import Config
from millrace.config.tables.algorithms import PolicyGradient


def inert(config: Config) -> list[str]:
    """Describes the keys without effect in a run of `config`, the reason, and the key that gives them an
    effect.

    Degenerate:
        Nobody chose the algorithm -> nobody expects an effect: empty.
        An algorithm of one's own -> nothing is known of it: empty.
    """
    algorithm, is_chosen = config.algorithm, "algorithm" in config.model_fields_set
    return list(_inert(config, algorithm)) if is_chosen and isinstance(algorithm, PolicyGradient) else []


def _inert(config: Config, a: PolicyGradient) -> Iterator[str]:
    one, on_policy = config.batch.minibatches * config.batch.epochs == 1, config.staleness_bound == 0
    of_ratio = [f'`algorithm.ratio` ("{a.ratio}")'] if a.ratio == "sequence" else []
    of_ratio += [f'`algorithm.clip` ("{a.clip}")'] if a.clip != "none" else []
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
