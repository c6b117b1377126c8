"""What grows with the size of a model: pages of a relay, digests, and what an update waits for a checkpoint.

    python benchmarks/large_state.py [--gigabytes 1 2 4] [--threads 1 2] [--step-s 2] [--json]

pages     a relay's memory allocated, GB/s: written to page by page, and asked for with `madvise`
digest    a version of 200 tensors digested, GB/s
stall     what the update after a checkpoint waits, with a step of `--step-s`: written from a copy, or not
save      until the files are on disk
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from common import parser_of, report, say, sized, table

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.types import CheckpointInfo
from millrace.devices import large_memory
from millrace.devices.large_memory import each
from millrace.trainer.files import checkpoint
from millrace.trainer.files.checkpoint import Snapshot
from millrace.trainer.files.directories import atomic_directory
from millrace.trainer.files.tensor_files import fill, lay_out, make
from millrace.trainer.publish.rechecked import Overlapped
from millrace.trainer.ranks.blocks import OwnedBlock
from millrace.trainer.ranks.mesh import ALONE
from millrace.weights.layout import create

TENSORS = 200
ADVICE, UNKNOWN_ADVICE = large_memory.MADV_POPULATE_WRITE, 99
MIB = 1 << 20


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def allocated(num_bytes: int, advice: int) -> float:
    """Seconds for two slots, which hold `num_bytes` together."""
    fd, memory = create(2, num_bytes // 2)
    try:
        with patch.object(large_memory, "MADV_POPULATE_WRITE", advice):
            return seconds(memory.fill)
    finally:
        memory.close()
        os.close(fd)


def version(num_bytes: int) -> list[NamedBuffer]:
    size = num_bytes // TENSORS
    data = np.random.default_rng(0).integers(0, 256, size * TENSORS, np.uint8)
    return [
        NamedBuffer(f"layers.{i}", "uint8", (size,), data[i * size : (i + 1) * size]) for i in range(TENSORS)
    ]


class Saved:
    """Checkpoints of a state of float32 tensors, as `trainer.files.checkpoint` writes them."""

    def __init__(self, num_bytes: int, directory: Path, *, copied: bool) -> None:
        self._tensors = {f"layers.{i}": torch.rand(num_bytes // TENSORS // 4) for i in range(TENSORS)}
        self._directory, self._copied = directory, copied
        self._optimizer = torch.optim.SGD(self._tensors.values(), lr=0.0)
        self._overlapped = Overlapped[CheckpointInfo]("await_saved")
        self._snapshot = Snapshot(ALONE)
        if copied:  # a trainer allocates the memory after its first update
            self._snapshot.of(self._blocks())

    def save(self, step_s: float) -> tuple[float, float]:
        """(stall, until the files were complete), in seconds."""
        self._overlapped.begin(self._work, time.perf_counter())
        time.sleep(step_s)
        self._overlapped.wait_read()
        self._optimizer.step()
        info = self._overlapped.result()
        return info.stall_s, info.save_s

    def _work(self) -> CheckpointInfo:
        began_s, files = time.perf_counter(), lay_out("model", self._tensors)
        blocks = self._blocks()
        copies = self._snapshot.of(blocks) if self._copied else None
        if copies is not None:
            blocks = copies
            self._overlapped.release()
        with atomic_directory(self._directory / "v", marker=files[0].name) as path:
            make(path, files)
            fill(path, files, blocks)
            stall_s = self._overlapped.release()
        return CheckpointInfo(0, "", time.perf_counter() - began_s, stall_s)

    def _blocks(self) -> list[OwnedBlock]:
        return [OwnedBlock(name, tuple(t.shape), (0,), t) for name, t in self._tensors.items()]


def checkpoints(num_bytes: int, step_s: float, *, copied: bool) -> dict[str, float]:
    """The longest of three."""
    directory = Path(tempfile.mkdtemp(prefix="millrace-large-", dir=Path.cwd()))
    try:
        with patch.object(checkpoint, "COPIED_BYTES_MIN", 0):
            saved = Saved(num_bytes, directory, copied=copied)
            stalls, saves = zip(*(saved.save(step_s) for _ in range(sized(3, 1))), strict=True)
    finally:
        shutil.rmtree(directory)
    return {"stall": max(stalls), "save": max(saves)}


def rates(num_bytes: int, threads: int) -> dict[str, float]:
    """GB/s."""
    tensors = version(num_bytes)
    with patch.object(large_memory, "num_threads", lambda: threads):
        written_s, asked_s = (allocated(num_bytes, advice) for advice in (UNKNOWN_ADVICE, ADVICE))
        digest_s = min(seconds(lambda: digest_buffers(tensors, each=each)) for _ in range(3))
    taken_s = {"pages written": written_s, "pages asked for": asked_s, "digest": digest_s}
    return {what: num_bytes / 1e9 / each_s for what, each_s in taken_s.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=sized([1, 2, 4], [0.02]))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--step-s", type=float, default=sized(2.0, 0.01))
    options = parser.parse_args()
    most = int(max(options.gigabytes) * 1e9) // MIB * MIB
    by_threads = {f"{threads} threads, GB/s": rates(most, threads) for threads in options.threads}
    table(by_threads)
    rows, stalls = dict[str, dict[str, float]](), dict[bool, float]()
    for gigabytes in options.gigabytes:
        for copied in (True, False):
            say(f"checkpoint of {gigabytes:g} GB")
            row = checkpoints(int(gigabytes * 1e9), options.step_s, copied=copied)
            rows[f"{gigabytes:g} GB, {'from a copy' if copied else 'without a copy'}"] = row
            stalls[copied] = row["stall"]
    table(rows)
    largest = {"stall_s": stalls[True], "stall_without_copy_s": stalls[False]}
    report({**largest, "rates": by_threads, "rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
