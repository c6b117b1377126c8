"""The figures of the benchmarks with vLLM are what they are said to be."""

from __future__ import annotations

import pytest
import vllm_run

import engines
from millrace.core.events import Event

OWN = {"tok/CPU s": 3000.0, "load ms": 5.0, "pause ms": 20.0}
VLLM = {"tok/CPU s": 2000.0, "load ms": 30.0, "pause ms": 60.0}


def test_answers_are_summed_up_by_their_medians_and_memory_by_its_peak():
    answers = [
        {"ready s": 2.0, "peak MB": 10.0},
        *({"tok/s": rate, "tok/CPU s": 2 * rate, "peak MB": 20.0} for rate in (100.0, 400.0, 200.0)),
        {"load ms": 5.0, "pause ms": 9.0, "pause CPU ms": 4.0, "peak MB": 30.0},
    ]
    told = engines.summed_up(answers)
    assert told == {
        "ready s": 2.0,
        "tok/s": 200.0,
        "tok/CPU s": 400.0,
        "load ms": 5.0,
        "pause ms": 9.0,
        "pause CPU ms": 4.0,
        "peak MB": 30.0,
    }
    assert "load ms" not in engines.summed_up(answers[:-1])


def test_the_torch_engine_is_compared_with_vllm_by_tokens_for_a_cpu_second():
    assert engines.figures({"own": OWN, "vllm": VLLM}, True) == {
        "own_over_vllm": 1.5,
        "vllm_load_pause_ms": 60.0,
        "vllm_conformance_passed": True,
    }


def test_without_vllm_there_are_no_figures_of_it():
    assert set(engines.figures({"own": OWN}, None).values()) == {None}


def step(time_s, gap):
    return Event("step", time_s, time_s, {"step_s": 2.0, "logprob_gap": gap})


def test_a_run_tells_the_gap_of_the_tokens_that_were_sampled_with_the_trained_version():
    events = [
        Event("worker_started", 0.0, 0.0, {"name": "trainer", "pid": 7}),
        step(10.0, {"0": [1e-3, 4e-3, 30]}),
        Event("pulled", 11.0, 11.0, {"pull_s": 0.1, "swap_s": 0.5}),
        step(14.0, {"0": [2e-3, 3e-3, 10], "1": [9.0, 9.0, 100]}),
    ]
    told = vllm_run.figures(events, {0: 100.0, 7: 200.0})
    assert told["gap_mean"] == pytest.approx(1.25e-3) and told["gap_max"] == 4e-3
    assert (told["steps"], told["loads"], told["step_s"], told["load_ms"]) == (2, 1, 4.0, 500.0)
    assert told["peak MB"] == {"controller": 100, "trainer": 200}
