"""Step time and memory of a trainer, and what a version costs on its way."""

from __future__ import annotations

import math

import pytest

from millrace_sim.costs.hardware import device
from millrace_sim.costs.models import model
from millrace_sim.costs.training import MFU, Training
from millrace_sim.costs.transport import PUSH_BYTES_PER_S, chain_s, collective_s, ddma_s, transfer

H800, SEVEN, LARGE = device("H800"), model("Qwen2.5-7B"), model("Qwen2.5-72B")


def test_a_step_of_one_device_is_its_work_over_achieved_peak():
    trainer = Training(SEVEN, H800, 1, recompute=False)
    length = 1000
    work = 3 * length * (2 * SEVEN.active_parameters + SEVEN.attention_flops(length / 2))
    expected = 64 * work / (H800.bf16_flops * MFU) + trainer.optimizer_s()
    assert trainer.step_s([length] * 64) == pytest.approx(expected)


def test_going_through_a_batch_again_costs_as_much_again_but_for_the_log_prob_pass():
    once = Training(SEVEN, H800, 8, updates=4, log_prob_pass=True)
    again = Training(SEVEN, H800, 8, updates=4, log_prob_pass=True, epochs=3)
    lengths = [4000] * 64
    first = once.log_prob_s(lengths)
    assert again.step_s(lengths) - first == pytest.approx(3 * (once.step_s(lengths) - first))


def test_recomputation_adds_a_forward_pass_and_so_does_a_log_prob_pass():
    plain = Training(SEVEN, H800, 8, recompute=False)
    again = Training(SEVEN, H800, 8, recompute=True)
    assert again.sequence_flops(100) == pytest.approx(4 / 3 * plain.sequence_flops(100))
    first = Training(SEVEN, H800, 8, recompute=False, log_prob_pass=True)
    assert first.step_s([4096] * 512) > plain.step_s([4096] * 512)


def test_the_busiest_rank_sets_the_pace():
    trainer = Training(SEVEN, H800, 4)
    assert trainer.heaviest([8.0, 1.0, 1.0, 1.0, 1.0]) == 8.0
    assert trainer.heaviest([2.0] * 8) == 4.0
    assert trainer.heaviest([]) == 0.0


def test_splitting_a_batch_into_updates_makes_it_less_even():
    whole = Training(SEVEN, H800, 8)
    split = Training(SEVEN, H800, 8, updates=8)
    work = [float(1 + i % 13) for i in range(128)]
    assert split.heaviest(work) > whole.heaviest(work)


def test_micro_batches_share_the_traffic_of_sharded_weights():
    trainer = Training(LARGE, H800, 256, model_parallel=8)
    assert trainer.sample_s(1, 64) > trainer.sample_s(16, 64)


def test_a_trainer_fits_where_states_and_activations_do():
    assert not Training(LARGE, H800, 8).fits(4096)
    assert Training(LARGE, H800, 64, model_parallel=8).fits(16_384)
    kept = Training(SEVEN, H800, 8, recompute=False).memory_bytes(32_768)
    assert kept > Training(SEVEN, H800, 8, recompute=True).memory_bytes(32_768)


def test_the_chain_takes_about_as_long_however_many_relays_it_has():
    size, rate = 145e9, 320e9
    times = [chain_s(relays, size, rate) for relays in (4, 16, 64, 128)]
    assert times == sorted(times)
    assert times[-1] < 1.7 * times[0]  # for 32 times as many
    assert chain_s(1, size, rate) == 0.0


def test_the_chain_uses_its_best_number_of_chunks():
    relays, size, rate, latency = 32, 1e10, 4e10, 3e-4
    tried = [(k + relays - 2) * (size / (k * rate) + latency) for k in range(1, 2000)]
    assert chain_s(relays, size, rate) == pytest.approx(min(tried), rel=1e-3)


def test_a_push_stalls_the_trainer_as_long_as_laminar_reports():
    for name, published in (("Qwen2.5-32B", 0.64), ("Qwen2.5-72B", 1.40)):
        stall = model(name).weights_bytes() / PUSH_BYTES_PER_S
        assert stall == pytest.approx(published, rel=0.02)


def test_sharded_copies_beat_a_gathered_broadcast_as_llamarl_reports():
    seventy, link = model("Llama-3.1-70B"), 40e9
    size = seventy.weights_bytes()
    direct = ddma_s(size, link, trainer_devices=128, replicas=16, tensor_parallel=8)
    assert direct < 1.15  # published, with everything around it
    assert collective_s(seventy, size, link) > 5 * direct


@pytest.mark.parametrize("kind", ["relay", "ddma", "collective", "disk", "delta"])
def test_every_transport_costs_something_and_nothing_is_negative(kind):
    cost = transfer(kind, SEVEN, H800, trainer_devices=64, replicas=64, tensor_parallel=1)
    times = (cost.trainer_stall_s, cost.available_s, cost.background_s, cost.replica_stall_s)
    assert all(t >= 0 and math.isfinite(t) for t in times)
    assert cost.trainer_stall_s > 0


def test_only_barriers_stop_replicas_for_long():
    def stop(kind):
        return transfer(kind, LARGE, H800, trainer_devices=64, replicas=32, tensor_parallel=8).replica_stall_s

    assert stop("relay") == stop("delta") < stop("ddma") < stop("collective") < stop("disk")
