"""Where versions may mix in a trajectory: within a turn, between turns, or never."""

from __future__ import annotations

from typing import Any, Literal

from millrace.schedule.refresh import AtOnce, WhenEmpty


def mixing(mix: Literal["within", "between", "never"]) -> dict[str, Any]:
    """The fields of a `Schedule` that say so.

    `never`: a later turn goes to a replica of its trajectory's version. If no replica serves the version, an
    empty replica takes it back. If no relay holds it any more, the trajectory and its episode begin again.
    """
    within = mix == "within"
    return {
        "mixes_versions": within,
        "one_version": mix == "never",
        "refresh_rule": AtOnce() if within else WhenEmpty(),
    }
