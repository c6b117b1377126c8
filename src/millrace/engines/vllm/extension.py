"""Methods that vLLM adds to its workers, for an engine whose workers are in other processes, and the repair
of its drafts on a CPU.

vLLM sends only plain values between its processes, so arguments and answers are pickled here. They travel
between a replica and its own child process, through sockets that only this user can open.

vLLM 0.32 on a CPU verifies drafts at a temperature that nobody set. Its sampler needs the temperature, top-k
and top-p of a row at each of the row's draft tokens. Its code for a CPU writes them into a copy, of integers,
that is thrown away. So logits are divided by what was in memory. Tokens and log-probs are wrong then, and
often not finite. Here the values are repeated by torch.

Its code for top-k alone fails in a step that verifies no draft. Nothing is cut off there.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from millrace.core.protocols import WeightsReader
from millrace.devices.gpu import has_own_memory
from millrace.engines.vllm import loading
from millrace.engines.vllm.loading import load_base, load_version


class MillraceWorker:
    """`worker_extension_cls` of vLLM: its worker inherits these methods. `collective_rpc` calls them."""

    _millrace_reader: tuple[bytes, WeightsReader] | None = None  # vLLM's worker has other names

    def load_published(self, reader: bytes, version: int, digest: str) -> bytes:
        """`loading.load_version` with a pickled `WeightsReader`. Returns: its errors, pickled."""
        return packed(load_version(self, self._opened(reader), version, digest))

    def load_base(self, base: bytes) -> bytes:
        """`loading.load_base` with its pickled arguments. Returns: its errors, pickled."""
        return packed(load_base(self, *unpacked(base)))

    def repair_sampler(self) -> None:
        repair_sampler(self)

    def release_memory(self) -> None:
        loading.release(self)

    def take_memory(self) -> None:
        loading.take_again(self)

    def _opened(self, pickled: bytes) -> WeightsReader:
        """The reader of the last load, if it is the same: its memory is mapped and pinned once."""
        if self._millrace_reader is None or self._millrace_reader[0] != pickled:
            if self._millrace_reader is not None:
                self._millrace_reader[1].close()
            self._millrace_reader = pickled, unpacked(pickled)
        return self._millrace_reader[1]


def packed(value: object) -> bytes:
    return pickle.dumps(value)


def unpacked(data: bytes) -> Any:
    """What the other process packed."""
    return pickle.loads(data)


# ---------------------------------------------------------------- drafts on a CPU


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
