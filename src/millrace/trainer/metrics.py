"""The metrics of a step, accumulated over micro-batches on the device and read once.

Shape suffix: N = trained tokens of one row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.algorithms import TokenLogprobs
from millrace.algorithms.build import WeightOf
from millrace.core.types import Batch
from millrace.trainer.importance import importance_metrics
from millrace.trainer.ranks.mesh import Ranks

Gap = dict[int, tuple[float, float, int]]


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Means over the batch's sequences, and the fraction of groups whose rewards are all equal."""
    sequences = [sequence for group in batch.groups for sequence in group.sequences]
    rewards = [[sequence.reward for sequence in group.sequences] for group in batch.groups]
    return {
        "reward": float(np.mean([s.reward for s in sequences])),
        "reward_std": float(np.mean([np.std(group) for group in rewards])),
        "groups_without_signal": float(np.mean([min(group) == max(group) for group in rewards])),
        "completion_tokens": float(np.mean([len(s.columns) for s in sequences])),
        "truncated": float(np.mean([s.truncated for s in sequences])),
    }


class TokenStatistics:
    """Sums over the trained tokens of a batch. `weight_cap`, `weight_of`: of `Algorithm`."""

    def __init__(self, weight_cap: float | None, weight_of: WeightOf = "token") -> None:
        self._cap, self._weight_of = weight_cap, weight_of
        self._entropy: list[torch.Tensor] = []
        self._log_ratio: list[torch.Tensor] = []
        self._log_weight: list[torch.Tensor] = []  # of the importance weights that a cap truncates
        self._reference: list[torch.Tensor] = []
        self._staleness: list[NDArray[np.int64]] = []
        self._after_swap: list[NDArray[np.bool_]] = []
        self._silenced: list[torch.Tensor] = []

    def add(
        self,
        logprobs: TokenLogprobs,
        before_N: torch.Tensor,
        entropy_N: torch.Tensor,
        staleness_N: NDArray[np.int64],
        after_swap_N: NDArray[np.bool_],
    ) -> None:
        """`before_N`: log-probs under the weights at the batch's beginning."""
        self._entropy.append(entropy_N.detach())
        log_N = before_N - logprobs.behavior_N
        self._log_ratio.append(log_N)
        if self._weight_of != "token":
            combined = logprobs.sequences.total if self._weight_of == "product" else logprobs.sequences.mean
            log_N = combined(log_N)
        self._log_weight.append(log_N)
        if logprobs.reference_N is not None:
            self._reference.append(before_N - logprobs.reference_N)
        self._staleness.append(staleness_N)
        self._after_swap.append(after_swap_N)

    def silence(self, gradient_N: torch.Tensor, advantages_N: torch.Tensor) -> None:
        """Count the tokens of an optimizer step with an advantage, and those of them without a gradient.
        `gradient_N` is without the gradient of a penalty."""
        judged_N = advantages_N != 0
        self._silenced.append(torch.stack([judged_N.sum(), (judged_N & (gradient_N == 0)).sum()]))

    def of_all(self, ranks: Ranks) -> TokenStatistics:
        """The statistics of every rank's tokens, the same on every rank. A collective call."""
        if ranks.world == 1:
            return self
        total = self.of_row()
        mine = self if ranks.tensor_index == 0 else total  # ranks of a tensor group have the same tokens
        for of_rank in ranks.gather(mine):
            total.extend(of_rank)
        return total

    def of_row(self) -> TokenStatistics:
        """Empty statistics, for the tokens of one row."""
        return TokenStatistics(self._cap, self._weight_of)

    def extend(self, other: TokenStatistics) -> None:
        """Add the tokens of `other` behind these."""
        for name, values in vars(other).items():
            if isinstance(values, list):
                getattr(self, name).extend(values)

    def metrics(self) -> dict[str, float]:
        """The metrics of `importance_metrics`, and

        entropy            in nats
        importance_mean, importance_max    of current / behavior
        importance_capped  fraction of tokens whose weight is above the cap
        kl_reference       mean log-ratio, with a reference
        silenced           fraction of the tokens with an advantage that a clip or a mask left without a
                           gradient; the gradient of a penalty does not count
        """
        if not self._log_ratio:
            return {}
        ratio = torch.cat(self._log_ratio).exp()
        out = {
            "entropy": torch.cat(self._entropy).mean().item(),
            "importance_mean": ratio.mean().item(),
            "importance_max": ratio.max().item(),
        }
        if self._cap is not None:
            capped = torch.cat(self._log_weight).exp() > self._cap
            out["importance_capped"] = capped.float().mean().item()
        if self._reference:
            out["kl_reference"] = torch.cat(self._reference).mean().item()
        if self._silenced:
            judged, silenced = torch.stack(self._silenced).sum(0).tolist()
            out["silenced"] = silenced / max(judged, 1)
        log_ratio = torch.cat(self._log_ratio).cpu().numpy()
        return out | importance_metrics(log_ratio, np.concatenate(self._staleness))

    def logprob_gap(self) -> Gap:
        """|current - behavior| in nats by staleness: (mean, max, tokens)."""
        if not self._log_ratio:
            return {}
        gap, staleness = self._gap(), np.concatenate(self._staleness)
        gaps = {int(behind): gap[staleness == behind] for behind in np.unique(staleness)}
        return {behind: (float(gap.mean()), float(gap.max()), len(gap)) for behind, gap in gaps.items()}

    def swap_gap(self) -> dict[str, float]:
        """The gap at staleness 0 of tokens sampled before any swap of weights in their trajectory
        (gap_one_version), and of tokens after a swap (gap_after_swap). Only tokens after a swap read
        recomputed keys and values. A metric without tokens is left out."""
        if not self._log_ratio:
            return {}
        gap, current = self._gap(), np.concatenate(self._staleness) == 0
        after = np.concatenate(self._after_swap)
        gaps = {"gap_one_version": gap[current & ~after], "gap_after_swap": gap[current & after]}
        return {name: float(gap.mean()) for name, gap in gaps.items() if len(gap)}

    def _gap(self) -> NDArray[np.float64]:
        return torch.cat(self._log_ratio).abs().double().cpu().numpy()
