"""What cannot be right in a configuration, though each of its keys is. Pure.

`allow` takes a refusal back, for who means it.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.algorithms import PolicyGradient
from millrace.config.generation import SamplingConfig
from millrace.config.schema import Config
from millrace.rollout.engines import ENGINES

CUTS = frozenset({"top_p", "top_k", "min_p"})


def tells_choices(config: Config) -> bool:
    """Whether the trainer knows which tokens `CUTS` leave."""
    able = "sampling.choices" in ENGINES[config.rollout.engine].can.settings
    return able and config.sampling.choices


def unsound(config: Config) -> list[str]:
    """Every such thing that `allow` does not name, with its remedy. Empty: none."""
    return [
        f'{told}, or say that you mean it: `allow = ["{name}"]`'
        for name, told in (*_uncorrected(config), *_cut_sampling(config))
        if name not in config.allow
    ]


def _uncorrected(config: Config) -> Iterator[tuple[str, str]]:
    """Tokens of other policies count as if the present one had drawn them. Known to end in collapse: LlamaRL,
    arXiv:2505.24034, section 6."""
    algorithm, bound = config.algorithm, config.staleness_bound
    if bound == 0 or not isinstance(algorithm, PolicyGradient):
        return
    if algorithm.anchor == "behavior" or algorithm.correction is not None:
        return
    if algorithm.second_moment is not None or algorithm.drift is not None:
        return
    age = "of any age" if bound is None else f"up to {bound} versions old"
    yield (
        "uncorrected",
        f'`algorithm.correction` ("none"): tokens are {age} (`schedule.kind` "{config.schedule.kind}"), and '
        "nothing corrects for the policies that sampled them.\n  Set it to 2.0",
    )


def _cut_sampling(config: Config) -> Iterator[tuple[str, str]]:
    """Tokens that are never drawn keep their probability; the others seem less likely than they were. Unless
    the engine tells which these are."""
    sampling, engine = config.sampling, config.rollout.engine
    plain = SamplingConfig()
    named = [
        f"`sampling.{key}` ({getattr(sampling, key)})"
        for key in sorted(CUTS)
        if getattr(sampling, key) != getattr(plain, key)
    ]
    if not named or tells_choices(config):
        return
    why, remedy = f'`rollout.engine` ("{engine}") does not tell which', '`rollout.engine` to "own"'
    if not sampling.choices:
        why, remedy = "`sampling.choices` is false", "`sampling.choices` to true"
    yield (
        "cut_sampling",
        f"{' and '.join(named)}: the engine draws from a part of the tokens, and the trainer knows all: "
        f"{why}. So their ratio is not 1, even on-policy (docs/algorithms.md).\n"
        f"  Set {remedy}, or `top_p` to 1, `top_k` and `min_p` to 0",
    )
