"""Log-probs are the trainer's at the version that they name, whatever is loaded and when."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from bench import MODELS, TOLERANCE, Bench, OpenBench, Played, make_model, prompt_of

from millrace.core.errors import UnknownVersionError, WeightsError
from millrace.core.types import Sampling, Work
from millrace.rollout.protocol import Capabilities

LENGTHS = (1, 2, 17, 64, 90)
FREE, LONG = Sampling(max_tokens=40), Sampling(max_tokens=100)
GREEDY = Sampling(max_tokens=24, temperature=0)


def groups(bench: Bench, sampling: Sampling = LONG) -> list[Work]:
    """Two groups of three."""
    return [bench.work(prompt_of(group, 20), sampling, group_id=group) for group in (0, 1) for _ in range(3)]


@pytest.mark.computed
@pytest.mark.parametrize("model", MODELS)
def test_logprobs_equal_the_trainers(model: str, bench_of: OpenBench) -> None:
    bench = bench_of(model)
    version = bench.serve(1)
    played = bench.play(bench.work(prompt_of(i, n), FREE) for i, n in enumerate(LENGTHS))
    assert {v for one in played for v, _ in one.columns.runs} == {version}
    bench.check(played)


@pytest.mark.computed
@pytest.mark.parametrize("model", MODELS)
def test_after_a_load_it_equals_a_fresh_engine(
    model: str, bench_of: OpenBench, fresh_bench: OpenBench
) -> None:
    used, fresh = bench_of(model), fresh_bench(model)
    used.serve(2)
    before = used.play(groups(used, GREEDY))
    used.serve(3)
    fresh.serve(3)
    after, expected = (bench.play(groups(bench, GREEDY)) for bench in (used, fresh))
    assert [one.tokens for one in after] == [one.tokens for one in expected]
    assert [one.tokens for one in after] != [one.tokens for one in before]
    assert used.engine.digest() == fresh.engine.digest() == fresh.digests[0]
    for one, other in zip(after, expected, strict=True):
        np.testing.assert_allclose(one.columns.logprobs, other.columns.logprobs, atol=TOLERANCE)


@pytest.mark.stepwise
@pytest.mark.computed
@pytest.mark.parametrize("model", MODELS)
def test_a_load_in_mid_generation_has_exact_spans(model: str, bench_of: OpenBench) -> None:
    bench = bench_of(model)
    first = bench.serve(1)
    bench.submit(groups(bench))
    for count, seed in ((5, 2), (9, 3)):
        bench.sample(count)
        bench.serve(seed)
    played = list(bench.drain().values())
    for one in played:
        versions = [version for version, _ in one.columns.runs]
        assert versions == sorted(set(versions)) and versions[0] == first
    assert any(len(one.columns.runs) == 3 for one in played)
    bench.check(played)


@pytest.mark.stepwise
@pytest.mark.computed
def test_a_load_late_in_a_trajectory_lets_it_go_on_to_the_end_of_the_context(bench_of: OpenBench) -> None:
    bench, endless = bench_of(max_sequence_tokens=64), Sampling(max_tokens=200, ignore_eos=True)
    first = bench.serve(1)
    bench.submit(bench.work(prompt_of(i, 6), endless) for i in range(3))
    bench.sample(40)
    second = bench.serve(2)
    played = list(bench.drain().values())
    assert all(len(one.tokens) == 58 for one in played)
    assert all([version for version, _ in one.columns.runs] == [first, second] for one in played)
    bench.check(played)


@pytest.mark.smoke
def test_what_is_staged_changes_nothing_before_the_swap(bench_of: OpenBench) -> None:
    bench = bench_of()
    served = bench.serve(1)
    digest, staged = bench.engine.digest(), bench.publish(2)
    assert bench.engine.stage(staged, bench.reader) == (bench.digests[staged],) * 2
    played = bench.play(groups(bench, FREE))
    assert (bench.engine.version, bench.engine.digest()) == (served, digest)
    assert {v for one in played for v, _ in one.columns.runs} == {served}
    bench.check(played)
    bench.engine.swap(staged)
    assert bench.engine.digest() == bench.digests[staged]
    bench.check(bench.play(groups(bench, FREE)))


def test_a_version_that_is_not_held_leaves_the_served_one(bench_of: OpenBench) -> None:
    bench = bench_of()
    served = bench.serve(1)
    with pytest.raises(UnknownVersionError):
        bench.engine.stage(served + 9, bench.reader)
    played = bench.play(groups(bench, FREE))
    assert bench.engine.version == served
    bench.check(played)


@pytest.mark.stepwise
def test_a_prompt_that_was_computed_under_another_version_is_computed_again(bench_of: OpenBench) -> None:
    bench, prompt = bench_of(), prompt_of(5, 70)
    bench.serve(1)
    bench.play([bench.work(prompt, FREE, group_id=3)])
    bench.submit([bench.work(prompt, LONG, group_id=3)])
    bench.sample(3)
    version = bench.serve(2)
    bench.submit([bench.work(prompt, LONG, group_id=group) for group in (3, 3, 4)])
    played = list(bench.drain().values())
    assert [one.columns.version_last for one in played[1:]] == [version] * 4
    bench.check(played)


def test_trajectories_of_one_group_may_begin_under_different_versions(bench_of: OpenBench) -> None:
    bench, prompt = bench_of(prefill_chunk=16), prompt_of(6, 100)
    bench.serve(1)
    bench.submit([bench.work(prompt, FREE, group_id=0)])
    bench.engine.step()  # a part of the prompt
    bench.serve(2)
    bench.submit([bench.work(prompt, FREE, group_id=0)])
    bench.check(bench.drain().values())


@pytest.mark.stepwise
@pytest.mark.computed
def test_without_recomputing_versions_are_exact_and_new_work_never_sees_an_old_cache(
    bench_of: OpenBench, can: Capabilities
) -> None:
    if "rollout.recompute" not in can.settings:
        pytest.skip("refused")
    bench, prompt = bench_of(recompute=False), prompt_of(5, 70)
    first = bench.serve(1)
    bench.submit([bench.work(prompt, LONG, group_id=3)])
    bench.sample(4)
    second = bench.serve(2)
    bench.submit([bench.work(prompt, FREE, group_id=group) for group in (3, 4)])
    old, *new = bench.drain().values()
    assert [version for version, _ in old.columns.runs] == [first, second]
    bench.check(new)
    bench.check([Played(old.work, old.columns[: old.columns.runs[0][1]])])


def test_before_the_first_version_work_waits(fresh_bench: OpenBench) -> None:
    bench = fresh_bench()
    assert bench.engine.version == -1
    bench.submit([bench.work([5, 6], FREE)])
    bench.engine.step()
    assert not bench.engine.has_work and bench.engine.take_progress() == []
    bench.serve(1)
    bench.check(bench.drain().values())


@pytest.mark.computed
def test_greedy_takes_the_largest_logit_and_tells_its_logprob_at_temperature_1(bench_of: OpenBench) -> None:
    bench = bench_of()
    version = bench.serve(1)
    played = bench.play(groups(bench, GREEDY))
    bench.check(played)
    for one in played:
        assert bench.logits(version, one).argmax(-1).tolist() == one.tokens


@pytest.mark.computed
def test_weights_that_are_not_finite_are_an_error_that_names_version_and_trajectory(
    fresh_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, seed: int) -> torch.nn.Module:
        model = copy.deepcopy(make_model(name, seed))  # the made one is kept for other tests
        with torch.no_grad():
            model.model.norm.weight.fill_(float("inf"))
        return model

    bench = fresh_bench()
    monkeypatch.setattr("bench.make_model", broken)
    version = bench.serve(1)
    work = bench.work([5, 6], FREE)
    with pytest.raises(WeightsError, match=rf"version {version} .*\[{work.trajectory_id}\]"):
        bench.play([work])
