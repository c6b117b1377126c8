"""Opens an engine in a process of its own, closes it twice, and says what is left.

Run as `python closed.py ENGINE OPTIONS`, the options as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import msgspec
import torch

from millrace.rollout.engine_kinds import open_engine
from millrace.rollout.protocol import EngineOptions
from millrace.runtime import process

SHARED = Path("/dev/shm")


def tensor_bytes() -> int:
    """Of all tensors that are alive in this process, counted once where they share their memory."""
    gc.unfreeze()  # vLLM has frozen what it opened with
    gc.collect()
    found = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def processes() -> list[str]:
    """What has been started and is left, but for Python's own watch over shared memory."""
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in process.descendants(os.getpid())]
    return [line for line in lines if "resource_tracker" not in line]


def main() -> None:
    name, options = sys.argv[1:]
    engine = open_engine(name, msgspec.json.decode(options, type=EngineOptions))
    bytes_open = tensor_bytes()
    engine.close()
    engine.close()
    del engine
    mine = [str(path) for path in SHARED.iterdir() if str(path) in Path("/proc/self/maps").read_text()]
    facts = {
        "bytes_open": bytes_open,
        "bytes_closed": tensor_bytes(),
        "processes": processes(),
        "shared": mine,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
