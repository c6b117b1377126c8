"""What a vLLM worker is asked for where the device is lent in turns. A GPU has vLLM's own sleep mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.engines.vllm import loading
from millrace.engines.vllm.start import _memory
from millrace.rollout.protocol import EngineOptions


def test_a_worker_on_a_gpu_sleeps_without_weights_and_wakes() -> None:
    asked: list[Any] = []
    worker = SimpleNamespace(
        device=torch.device("cuda"),
        sleep=lambda level: asked.append(level),
        wake_up=lambda: asked.append("wake"),
    )
    loading.release(worker)
    loading.take_again(worker)
    assert asked == [2, "wake"]


@pytest.mark.parametrize("colocated", [True, False])
def test_only_a_device_in_turns_has_sleep_mode(colocated: bool) -> None:
    options = EngineOptions(model_path="none", colocated=colocated, keep_kv=False, probe=False)
    arguments = _memory(options, torch.bfloat16, torch.device("cuda"))
    assert arguments["enable_sleep_mode"] is colocated


def test_a_worker_on_a_cpu_drops_weights_their_packed_copies_and_the_cache() -> None:
    linear, cache = torch.nn.Linear(256, 256), torch.ones(2, 64, 1024)
    linear.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
    runner = SimpleNamespace(get_model=lambda: torch.nn.Sequential(linear), kv_caches=[cache])
    worker = SimpleNamespace(device=torch.device("cpu"), model_runner=runner)
    address = cache.data_ptr()
    loading.release(worker)
    assert linear.cpu_linear is None and not cache[0, 1:-1].any() and not linear.weight[4:-4].any()
    loading.take_again(worker)
    assert cache.data_ptr() == address
