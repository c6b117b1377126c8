"""What does not go together with `rollout.colocated`: one device, which trainer and replicas use in turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from millrace.config.tables.runtime import LocalHosts
from millrace.config.tables.schedules import AReaL, LlamaRL

if TYPE_CHECKING:
    from millrace.config.schema import Config


def why_not_colocated(config: Config) -> str:
    """The first reason, with its remedy. Empty: there is none."""
    return next(_reasons(config), "")


def _reasons(config: Config) -> Iterator[str]:
    bound, kind, servers = config.staleness_bound, config.schedule.kind, config.rollout.servers
    if bound not in (0, 1):
        yield (
            f'trains what is at most 1 version old, and `schedule.kind` ("{kind}") has the staleness bound '
            f"{'none' if bound is None else bound}: on one device generation runs no further ahead.\n"
            '  Set it to "synchronous", or to "areal" with `schedule.eta` = 1'
        )
    if bound == 1 and not isinstance(config.schedule, LlamaRL | AReaL):
        yield (
            f'keeps trajectories over the turn of the trainer, and under `schedule.kind` ("{kind}") a '
            "trajectory has one version.\n"
            '  Set it to "areal" with `schedule.eta` = 1, or the staleness bound to 0'
        )
    if servers:
        yield (
            f"lends one device, and `rollout.servers` ({len(servers)}) have devices of their own.\n"
            "  Leave one of them out"
        )
    if config.evaluations:
        yield (
            "has no place for the evaluator of `evaluations`, which computes beside both sides.\n"
            "  Leave `evaluations` out, and evaluate checkpoints with `millrace eval`"
        )
    if config.reference_apart:
        yield (
            'has no place for `algorithm.reference` ("replica"), which computes beside both sides.\n'
            '  Set it to "trainer"'
        )
    if not isinstance(config.runtime, LocalHosts) or config.runtime.hosts > 1:
        yield (
            f'is for one host, and `runtime.kind` ("{config.runtime.kind}") has several.\n'
            '  Set it to "local", with `runtime.hosts` = 1'
        )
