"""What cannot be right in a configuration, though each of its keys is. Pure.

`allow` takes a refusal back, for who means it.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.algorithms import PolicyGradient
from millrace.config.schema import Config


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
    """Tokens that are never drawn keep their probability; the others seem less likely than they were."""
    sampling = config.sampling
    cuts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    named = [f"`sampling.{key}` ({getattr(sampling, key)})" for key, cut in cuts.items() if cut]
    if named:
        yield (
            "cut_sampling",
            f"{' and '.join(named)}: the engine draws from a part of the tokens, and the trainer knows all. "
            "So their ratio is not 1, even on-policy (docs/algorithms.md).\n"
            "  Set `top_p` to 1, `top_k` and `min_p` to 0",
        )
