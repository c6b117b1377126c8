"""Weights that are not where they should be. A host may get versions more slowly than the trainer makes them.

Four faults show in the gap between the trainer's and the engine's log-prob of a token.

At staleness 0 both have the same weights, so the gap is only the difference of two computations. The gap is
about 1e-6 nats in float32 and 1e-2 in bfloat16 (0.05 in sequences of 2,048 tokens), and the same in every
step. If penalties, min-p, top-k, top-p, allowed or banned tokens are in use, they change the gap, and no rule
reads it. Each fault changes the gap in its own way:

    wrong weights    the gap differs from version to version, or is large in all versions
    stale cache      the gap is large only for tokens after a swap: they read keys and values of older weights
    numeric gap      the gap is larger than training tolerates, in all steps alike
    true staleness   the gap is small at staleness 0 and large at 1 and more: the policies do differ
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import fmean, median

from millrace.diagnose.evidence import Evidence, Step
from millrace.diagnose.finding import CORRECTED, Finding, bound_key, few, tolerant

# In nats: rounding explains so much, with a margin. fp8: `rollout.quantization` or `trainer.quantization`.
EXPECTED = {"float32": 1e-3, "bfloat16": 1e-1, "fp8": 2e-1}
HARMFUL = 3e-3  # an importance weight is off by 0.3 %, where it should be 1
LARGE = 0.2  # as large as a clip range, between two policies that should be the same
TIMES = 10.0  # a rise that rounding does not explain
SHARE_MIN = 0.05  # of the trained tokens: a staleness with fewer tokens is ignored


def wrong_weights(evidence: Evidence) -> Finding | None:
    lines = _of_other_digests(evidence)
    if evidence.plain:
        lines += _of_gaps(evidence.steps, evidence.dtype)
    return Finding("wrong-weights", tuple(lines), _WRONG_WEIGHTS) if lines else None


def stale_cache(evidence: Evidence) -> Finding | None:
    """Compares tokens of the same steps, so only the swap is different between them."""
    pairs = [
        (step.metrics["gap_one_version"], step.metrics["gap_after_swap"])
        for step in evidence.steps
        if {"gap_one_version", "gap_after_swap"} <= step.metrics.keys()
    ]
    if not pairs:
        return None
    before, after = (fmean(side) for side in zip(*pairs, strict=True))
    if after < max(HARMFUL, TIMES * before):
        return None
    line = (
        f"at staleness 0, in the same {len(pairs)} steps: tokens after a swap have a gap of {after:.2g} nats "
        f"and tokens of one version {before:.2g}"
    )
    return Finding("stale-cache", (line,), _STALE_CACHE)


def numeric_gap(evidence: Evidence) -> Finding | None:
    gaps = [gap for _, gap in gaps_at_zero(evidence.steps)] if evidence.plain else []
    expected = EXPECTED[evidence.dtype]
    if not gaps or fmean(gaps) <= expected:
        return None
    line = (
        f"at staleness 0 the gap is {fmean(gaps):.2g} nats ({min(gaps):.2g} to {max(gaps):.2g}) without a "
        f"trend; rounding in {evidence.dtype} explains {expected:g}"
    )
    return Finding("numeric-gap", (line,), tuple(_less_rounding(evidence)))


def _less_rounding(evidence: Evidence) -> Iterator[str]:
    cause = "engine and trainer round differently: usual with `model.dtype` bfloat16, a bug with float32"
    remedy = "set `model.dtype` to float32"
    if evidence.dtype == "fp8":
        cause = "one side computes with rounded weights, and to this model that is a different policy"
        remedy = "leave `rollout.quantization` out, or `trainer.quantization`"
    yield cause
    corrected = evidence.algorithm in CORRECTED
    keep = "keep the correction on (`algorithm.correction`), or " if corrected else ""
    yield f"{keep}{remedy}"


def true_staleness(evidence: Evidence) -> Finding | None:
    late = evidence.steps[len(evidence.steps) // 2 :]
    by_staleness = {
        staleness: mean
        for staleness in sorted({s for step in late for s in step.gap})
        if (mean := _mean_gap(late, staleness)) is not None
    }
    tokens = Counter[int]()
    for step in late:
        tokens.update({staleness: num for staleness, (_, _, num) in step.gap.items()})
    many = [s for s, num in tokens.items() if s > 0 and num >= SHARE_MIN * tokens.total()]
    worst = max((by_staleness[s] for s in many if s in by_staleness), default=0.0)
    if worst < max(LARGE, TIMES * by_staleness.get(0, 0.0)):
        return None
    means = ", ".join(f"{mean:.2g} nats at {staleness}" for staleness, mean in by_staleness.items())
    capped = [step.metrics["importance_capped"] for step in late if "importance_capped" in step.metrics]
    lines = [f"the gap by staleness: {means}"]
    if capped:
        lines.append(f"{fmean(capped):.1%} of the tokens have a truncated importance weight")
    return Finding("true-staleness", tuple(lines), tuple(_less_stale(evidence)))


def _less_stale(evidence: Evidence) -> Iterator[str]:
    yield "within the allowed staleness the policy changes much"
    bound = bound_key(evidence)
    yield f"lower the bound on staleness (`{bound}`) or `optimizer.lr`" if bound else "lower `optimizer.lr`"
    yield from tolerant(evidence)


def gaps_at_zero(steps: list[Step]) -> list[tuple[int, float]]:
    """(version, mean gap at staleness 0) of each step with such tokens. Tokens after a swap are left out."""
    gaps = [(step.version - 1, step.metrics.get("gap_one_version", _unsplit(step))) for step in steps]
    return [(version, gap) for version, gap in gaps if gap is not None]


def _unsplit(step: Step) -> float | None:
    """The gap of all tokens, from a trainer that does not separate tokens after a swap."""
    return step.gap[0][0] if 0 in step.gap and "gap_after_swap" not in step.metrics else None


def _of_other_digests(evidence: Evidence) -> list[str]:
    lines = [
        f"{pull.replica} served digest {pull.digest[:12]} as version {pull.version}, published was "
        + " or ".join(sorted(digest[:12] for digest in evidence.published[pull.version]))
        for pull in evidence.pulls
        if pull.digest not in evidence.published.get(pull.version, {pull.digest})
    ]
    if evidence.end.startswith("DigestMismatchError"):
        lines.append(f"the run ended with {evidence.end.splitlines()[0]}")
    return lines[:3]


def _of_gaps(steps: list[Step], dtype: str) -> list[str]:
    """The gap of some versions, or of all versions, is too large."""
    gaps = gaps_at_zero(steps)
    if not gaps:
        return []
    least = min(gap for _, gap in gaps)
    odd = {version: gap for version, gap in gaps if gap > max(HARMFUL, EXPECTED[dtype], TIMES * least)}
    if odd:
        worst = max(odd, key=lambda version: odd[version])
        return [
            f"at staleness 0 the gap is as small as {least:.2g} nats and as large as {odd[worst]:.2g} "
            f"(version {worst}); it is too large at {few(sorted(odd), 'version')}"
        ]
    if least > max(LARGE, 2 * EXPECTED[dtype]):
        return [f"at staleness 0 the gap is {least:.2g} nats or more at every version"]
    return []


def _mean_gap(steps: list[Step], staleness: int) -> float | None:
    gaps = [step.gap[staleness] for step in steps if staleness in step.gap]
    tokens = sum(num for _, _, num in gaps)
    return sum(mean * num for mean, _, num in gaps) / tokens if tokens else None


_WRONG_WEIGHTS = (
    "the engine does not compute with the trainer's weights. Do not trust the steps after that version",
    "go back to an earlier checkpoint. Then look for a tensor that the engine does not load (tied or fused "
    "weights, a custom engine), and test the host's memory",
)
_STALE_CACHE = (
    "after a swap the engine reads keys and values of old weights. The engine must drop its cache, and "
    "prefill trajectories in flight again (`rollout.recompute`)",
    'until this is corrected, swap only between trajectories: `schedule.kind = "synchronous"`',
)


FETCHES_MIN = 8  # fewer prove nothing about a link
MISSES_MIN = 3  # in a row; after the death of a relay the fetch is repeated


def host_behind(evidence: Evidence) -> Finding | None:
    lines = [*_slow(evidence), *_cut_off(evidence)]
    return Finding("host-behind", tuple(lines), _ADVICE) if lines else None


def _slow(evidence: Evidence) -> Iterator[str]:
    """A version takes longer than the steps between two of them."""
    steps = [step.batch for step in evidence.steps if step.batch is not None and not step.batch.replayed]
    if not steps:
        return
    step_s = median(step.step_s + step.wait_s for step in steps)
    for name, host in evidence.hosts.by_host.items():
        if len(host.seconds) < FETCHES_MIN or (fetch_s := median(host.seconds)) <= step_s:
            continue
        rate = f" ({host.received_bytes / host.received_s / 1e6:.0f} MB/s)" if host.received_s else ""
        yield (
            f"host {name} takes {fetch_s:.2g} s for a version{rate}, from {host.source or 'others'}, and a "
            f"step of the trainer takes {step_s:.2g} s: its replicas are always behind"
        )


def _cut_off(evidence: Evidence) -> Iterator[str]:
    for name, host in evidence.hosts.by_host.items():
        if host.missed_because and host.misses >= max(MISSES_MIN, len(host.seconds)):
            first = host.missed_because.splitlines()[0]
            yield f"host {name} got no version in {host.misses} tries. The last: {first}"


_ADVICE = (
    "look at the link and the load of that host, and of the host that it fetches from",
    "replicas there go on under an older version. With a staleness bound of 0 they can start nothing new",
)
