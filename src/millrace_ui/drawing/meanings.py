"""What the three measures of asynchrony mean, wherever they are shown."""

from __future__ import annotations

STALENESS = (
    "How many versions newer the trained weights are than the weights that sampled a token. 0: the newest "
    "weights sampled it. The bound of the schedule is the largest staleness that is trained."
)
FAIRNESS = (
    "Whether the last 32 batches are fair samples of their groups: 1 is fair, and usual are 0.5 to 1.3. "
    "It is the variance between batches of the mean length, over the variance that random batches of the "
    "same groups would have. Above 1 similar lengths are trained together. Below 1 batches are more alike "
    "than random ones."
)
GAP = (
    "The absolute difference between the log-probs of engine and trainer, in nats, by staleness. At "
    "staleness 0 both have the same weights: there the gap is rounding, and a jump means a bug. With "
    "staleness it grows, because the weights differ."
)

ASYNCHRONY = {"staleness": STALENESS, "fairness": FAIRNESS, "log-prob gap": GAP}
