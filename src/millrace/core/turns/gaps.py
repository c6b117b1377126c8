"""The gaps between two turns of a trajectory, and how long one that waits will still be away. Pure."""

from __future__ import annotations

import math

SPREAD_MIN = 0.05
"""Least standard deviation of the logarithms: equal gaps say little of the next one."""
FAR = 30.0
"""Beyond so many standard deviations a normal tail is its asymptote."""
LEAVES_MAX = 10_000
"""Departures that are remembered: far more than trajectories wait at once. An episode that ended does not
return."""


class Gaps:
    """Gaps are log-normal: answers of tools and of people have long tails. Mean and variance of their
    logarithms are those of the gaps that were seen, and of two more to begin with: of 1 / e and e seconds.

    Times are seconds on any one clock.
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 2, 0.0, 2.0
        self._left_s: dict[int, float] = {}  # by trajectory, oldest first

    def leave(self, trajectory_id: int, now_s: float) -> None:
        """A turn ends."""
        self._left_s.pop(trajectory_id, None)
        self._left_s[trajectory_id] = now_s
        if len(self._left_s) > LEAVES_MAX:
            del self._left_s[next(iter(self._left_s))]

    def come_back(self, trajectory_id: int, now_s: float) -> None:
        """The next turn begins. A trajectory that never left changes nothing."""
        left_s = self._left_s.pop(trajectory_id, None)
        if left_s is not None:
            self._add(math.log(max(now_s - left_s, 1e-6)))

    def _add(self, log_s: float) -> None:
        """Welford's update."""
        self._count += 1
        step = log_s - self._mean
        self._mean += step / self._count
        self._squares += step * (log_s - self._mean)

    def left_s(self, trajectory_id: int, now_s: float) -> float:
        """Seconds until the trajectory is expected back; infinity if it never left. In the end they grow with
        the time that it has been away, so one that never returns comes to be the last.

            E[X - t | X > t] = e^(m + s^2 / 2) Q(z - s) / Q(z) - t,   z = (ln t - m) / s,   Q = 1 - Phi
        """
        if trajectory_id not in self._left_s:
            return math.inf
        waited_s = max(now_s - self._left_s[trajectory_id], 1e-6)
        spread = max(math.sqrt(self._squares / self._count), SPREAD_MIN)
        z = (math.log(waited_s) - self._mean) / spread
        if z > FAR:
            return waited_s * spread / z
        tails = math.erfc((z - spread) / math.sqrt(2.0)) / math.erfc(z / math.sqrt(2.0))
        return math.exp(self._mean + spread**2 / 2) * tails - waited_s
