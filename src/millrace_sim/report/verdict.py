"""The conclusion of a comparison of schedules, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millrace_sim.report.compare import Comparison

BUSY = 0.9
"""A side that works for this share of the time, or more, counts as always busy."""


def verdict(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Sentences: the fastest schedule, the certainty of that, and its bottleneck."""
    ranked = sorted(comparisons, key=_speed, reverse=True)
    best = ranked[0]
    rate = best.estimate("trained_tokens_per_s")
    stale = best.estimate("staleness_mean").mean
    trained = f"{rate.mean:,.0f} tokens/s at a mean staleness of {stale:.2f}"
    if len(ranked) == 1:
        yield f"`{best.name}` trains {trained}."
    else:
        second = ranked[1]
        gain, other = rate.mean / max(_speed(second), 1e-9) - 1, second.estimate("trained_tokens_per_s")
        yield f"`{best.name}` is the fastest: {trained}, {gain:.1%} more tokens/s than `{second.name}`."
        if not rate.half_width:
            yield "One seed each: how sure the order is cannot be said; --seeds 5 tells."
        elif rate.mean - rate.half_width < other.mean + other.half_width:
            yield "Their 95 % intervals overlap: the two may as well be equal."
    yield _bottleneck(best)
    waits, answer = best.known("episode_waits"), best.known("answer_s")
    if waits is not None and answer is not None:
        trainer, replicas = best.estimate("trainer_waits").mean, 1 - best.estimate("replica_busy").mean
        yield (
            f"An answer of the environment takes {answer.mean:,.2g} s. Waiting: episodes {waits.mean:.0%} of "
            f"their time, the trainer {trainer:.0%}, replicas {replicas:.0%}."
        )


def _speed(comparison: Comparison) -> float:
    return comparison.estimate("trained_tokens_per_s").mean


def _bottleneck(best: Comparison) -> str:
    trainer, replicas = best.estimate("trainer_busy").mean, best.estimate("replica_busy").mean
    if trainer >= BUSY > replicas:
        return f"The trainer is the slower side (busy {trainer:.0%}; replicas {replicas:.0%})."
    if replicas >= BUSY > trainer:
        return f"Generation is the slower side (replicas busy {replicas:.0%}; trainer {trainer:.0%})."
    if min(trainer, replicas) >= BUSY:
        return f"Both sides are busy (trainer {trainer:.0%}, replicas {replicas:.0%}): they are in balance."
    return f"Both sides wait at times (trainer busy {trainer:.0%}, replicas {replicas:.0%})."
