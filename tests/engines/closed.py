"""Opens an engine in a process of its own, closes it twice, and says what is left.

Run as `python closed.py ENGINE MODEL`."""

from __future__ import annotations

import gc
import json
import os
import sys

import torch

from millrace.rollout.engines import open_engine
from millrace.rollout.protocol import EngineOptions
from millrace.runtime import process


def tensor_bytes() -> int:
    """Of all tensors that are alive, counted once where they share their memory."""
    gc.unfreeze()  # vLLM has frozen what it opened with
    gc.collect()
    found = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def main() -> None:
    name, model_path = sys.argv[1:]
    engine = open_engine(name, EngineOptions(model_path=model_path, device="cpu", max_sequence_tokens=256))
    bytes_open = tensor_bytes()
    engine.close()
    engine.close()
    del engine
    told = {
        "bytes_open": bytes_open,
        "bytes_closed": tensor_bytes(),
        "children": process.children(os.getpid()),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
