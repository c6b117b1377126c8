"""The memory of one vLLM worker, where the device is lent in shifts. The next load fills what is taken again.

On a GPU vLLM's own sleep mode gives back the memory. vLLM's worker for a CPU ignores sleep mode.
"""

from __future__ import annotations

from typing import Any, cast

from millrace.devices.gpu import has_own_memory
from millrace.devices.released_memory import ReleasedMemory


def release(worker: Any) -> None:
    """Give back the memory of weights, keys and values. `collective_rpc` calls this with a vLLM worker, in
    the worker's process. Nothing of a request may be in the cache."""
    if has_own_memory(worker.device):
        worker.sleep(level=2)
        return
    model = worker.model_runner.get_model()
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            cast(Any, module).cpu_linear = None  # has packed weights; a load packs anew
    tensors = [*model.parameters(), *worker.model_runner.kv_caches]
    worker.millrace_released = ReleasedMemory(tensors, device_type=worker.device.type)


def take_again(worker: Any) -> None:
    """Take what `release` gave back. The model has no weights before the next load."""
    if has_own_memory(worker.device):
        worker.wake_up()
    else:
        worker.millrace_released.take_again()
