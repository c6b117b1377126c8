"""A host that gets versions more slowly than the trainer makes them, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from millrace.diagnose.evidence import Evidence
from millrace.diagnose.finding import Finding

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
