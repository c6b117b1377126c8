"""The state of a run in short phrases, which the panel and the plain line share. ASCII only."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from millrace.observe.conversation_times import ENVIRONMENT, MODEL
from millrace.observe.environment_use import EpisodeWaits
from millrace.observe.live.status import Status
from millrace.observe.shown_samples import transcript

_GIB = 2**30


def speeds(status: Status) -> str:
    trained, generated = number(status.speeds.trained.per_s), number(status.speeds.generated.per_s)
    return f"tokens/s {trained} trained, {generated} generated"


def fairness(status: Status) -> list[str]:
    """Nothing while there are too few batches."""
    return [] if status.fairness is None else [f"fairness {status.fairness:.2f}"]


def starting(status: Status) -> str:
    """Before the first step: which workers run, and how many trajectories are in flight."""
    if not status.ready:
        return "starting the workers"
    under_way = f"; in flight {status.in_flight}" if status.in_flight else ""
    return f"no step yet; started: {', '.join(status.ready)}{under_way}"


def learning(status: Status) -> str:
    """Figures of learning in the last step. A loss near 0 is usual, an entropy near 0 is not."""
    metrics = status.metrics
    loss, entropy = number(metrics.get("loss"), ".3g"), number(metrics.get("entropy"), ".3g")
    return f"loss {loss}, entropy {entropy}, no signal {percent(metrics.get('groups_without_signal'))}"


def failed_rewards(status: Status) -> str:
    share = status.num_failed / status.num_scores if status.num_failed else None
    return f"failed rewards {status.num_failed:,}" + (f" ({share:.1%})" if share is not None else "")


def environment(status: Status) -> list[str]:
    """Who episodes wait for. Then the answers between two turns, if there are any."""
    use = status.environment
    waits = [_waits(use.waits, status.wall_s)] if use.waits.plays and status.ended is None else []
    if use.mean_answer_s is None:
        return waits
    counts = dict(status.episodes)
    num_open = counts.pop("open", 0)
    closed = ", ".join(f"{num:,} {cause.replace('_', ' ')}" for cause, num in sorted(counts.items()))
    episodes = [f"episodes {num_open:,} open, closed: {closed}"] if closed else []
    return [
        *waits,
        *episodes,
        f"answers {use.num_answers:,}, {use.mean_answer_s:.2g} s each, {use.observed_share:.0%} observed",
    ]


def _waits(waits: EpisodeWaits, wall_s: float) -> str:
    oldest = {role: waits.longest_s(role, wall_s) for role in (MODEL, ENVIRONMENT)}
    counts = (f"{waits.count(role)} for the {role} (longest {duration(s)})" for role, s in oldest.items())
    return f"episodes wait: {', '.join(counts)}"


def memory(status: Status) -> list[str]:
    """The memory of the largest process and the free memory of the host; nothing while that is unknown."""
    resident_bytes = status.resident_bytes
    if not resident_bytes:
        return []
    name = max(resident_bytes, key=lambda process: resident_bytes[process])
    free = "" if status.available_bytes is None else f", {_gib(status.available_bytes)} GiB free"
    return [f"memory {name} {_gib(resident_bytes[name])} GiB{free}"]


def sample(status: Status) -> tuple[str, str, str] | None:
    """(heading, prompt, completion) of the newest sample, each on one line. None: there is none yet."""
    newest = status.sample
    if newest is None:
        return None
    prompt, completion = (" ".join(text.split()) for text in (newest["prompt"], transcript(newest)))
    heading = f"sample of step {newest['version']}, reward {number(newest['reward'], '.3g')}:"
    return heading, prompt, completion


def ends(text: str, room: int) -> str:
    """`text`, or some of its beginning and more of its end."""
    if len(text) <= room:
        return text
    tail = max(1, (room - 5) * 2 // 3)
    return f"{text[: max(0, room - 5 - tail)]} ... {text[-tail:]}"


def last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, seconds = divmod(ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}"
