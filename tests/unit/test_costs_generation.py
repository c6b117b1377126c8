"""Decode, prefill and memory of a replica, worked by hand."""

from __future__ import annotations

import pytest

from millrace.core.errors import ConfigError
from millrace_sim.costs.generation import (
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    SEQUENCE_S,
    STEP_S,
    Generation,
)
from millrace_sim.costs.hardware import DEVICES, device
from millrace_sim.costs.models import model

H100, SEVEN = device("H100"), model("Qwen2.5-7B")


def test_a_small_batch_waits_for_the_weights_and_a_large_one_for_the_products():
    replica = Generation(SEVEN, H100)
    reading = SEVEN.weights_bytes() / (3.35e12 * MEMORY_EFFICIENCY)
    assert replica.matrices_s(1) == pytest.approx(reading)
    computing = 2 * SEVEN.active_parameters * 2048 / (989.4e12 * COMPUTE_EFFICIENCY)
    assert replica.matrices_s(2048) == pytest.approx(computing)


def test_a_decode_step_is_the_sum_of_its_kernels_and_of_the_engine():
    replica = Generation(SEVEN, H100)
    attention = 64 * 4096 * SEVEN.kv_token_bytes() / (3.35e12 * MEMORY_EFFICIENCY)
    expected = replica.matrices_s(64) + attention + STEP_S + 64 * SEQUENCE_S
    assert replica.decode_s(64, 64 * 4096) == pytest.approx(expected)


def test_seconds_per_sample_fall_with_the_batch_until_the_cache_dominates():
    replica = Generation(SEVEN, H100)
    cost = [replica.sample_s(batch, 512, 2048) for batch in (1, 4, 16, 64, 256)]
    assert cost == sorted(cost, reverse=True)
    assert cost[0] > 20 * cost[-1]


def test_tensor_parallelism_costs_throughput_per_device_and_more_across_hosts():
    large = model("Llama-3.1-70B")
    seconds = {
        tensor_parallel: Generation(large, H100, tensor_parallel).decode_s(64, 64 * 4096)
        for tensor_parallel in (1, 4, 8, 16)
    }
    efficiency = [seconds[1] / (tensor_parallel * seconds[tensor_parallel]) for tensor_parallel in seconds]
    assert efficiency == sorted(efficiency, reverse=True)
    assert efficiency[2] > 0.5 > efficiency[3]


def test_fp8_halves_what_a_small_batch_reads():
    bf16, fp8 = Generation(SEVEN, H100), Generation(SEVEN, H100, dtype="fp8")
    assert fp8.matrices_s(1) == pytest.approx(bf16.matrices_s(1) / 2)
    assert fp8.kv_capacity_tokens > bf16.kv_capacity_tokens


def test_a_device_without_fp8_units_computes_in_bf16():
    a100 = device("A100")
    assert a100.flops("fp8") == a100.flops("bf16")


def test_prefill_of_a_longer_context_takes_longer_per_token():
    replica = Generation(SEVEN, H100)
    assert replica.prefill_s(0) == 0.0
    assert replica.prefill_s(1024, 16_384) > replica.prefill_s(1024)


def test_kv_room_is_what_weights_leave_and_none_is_an_error():
    room = 0.9 * 80e9 - SEVEN.weights_bytes()
    assert Generation(SEVEN, H100).kv_capacity_tokens == int(room / SEVEN.kv_token_bytes())
    with pytest.raises(ConfigError, match="tensor parallel"):
        _ = Generation(model("Llama-3.1-405B"), H100, 8).kv_capacity_tokens
    assert not Generation(model("Llama-3.1-405B"), H100, 8).fits


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_says_where_its_numbers_are_from(name):
    entry = DEVICES[name]
    assert len(entry.source) > 20
    assert entry.memory_bytes_per_s > entry.scale_out_bytes_per_s > 0
    assert entry.bf16_flops > 0


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="H800"):
        device("H900")
