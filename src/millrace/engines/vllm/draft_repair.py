"""vLLM 0.32 on a CPU verifies drafts at a temperature that nobody set.

Its sampler needs the temperature, top-k and top-p of a row at each of the row's draft tokens. Its code for a
CPU writes them into a copy, of integers, that is thrown away. So logits are divided by what was in memory.
Tokens and log-probs are wrong then, and often not finite. Here the values are repeated by torch.

Its code for top-k alone fails in a step that verifies no draft. Nothing is cut off there.
"""

from __future__ import annotations

from typing import Any

import torch

from millrace.devices.gpu import has_own_memory


def repair_sampler(worker: Any) -> list[Exception]:
    """`collective_rpc` calls this with a vLLM worker, in the worker's process. Returns: no error."""
    if not has_own_memory(worker.device):
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = repeated
        if not isinstance(rejection_sampler.apply_top_k_top_p, CutOff):
            rejection_sampler.apply_top_k_top_p = CutOff(rejection_sampler.apply_top_k_top_p)
    return []


class CutOff:
    """vLLM's function for top-k and top-p, which is not called for no logits."""

    def __init__(self, cut_off: Any) -> None:
        self._cut_off = cut_off

    def __call__(self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        cut: torch.Tensor = self._cut_off(logits, k, p) if logits.numel() else logits
        return cut


def repeated(
    of_rows: torch.Tensor,
    ends: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """The value of each row at each of its tokens; `replace_from` becomes `replace_to`.

    Shapes:
        of_rows  (rows,)
        ends     (rows,) one past a row's last token
        returns  (num_tokens,)
    """
    replaced = of_rows.masked_fill(of_rows == replace_from, replace_to)
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
    return replaced.repeat_interleave(counts, output_size=num_tokens)
