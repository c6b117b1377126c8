"""Simulated runs on modelled clusters: what is measured, compared, shown, and refused."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from html.parser import HTMLParser

import pytest
from benchmarks.published.pipelines import Batch, Pipelines, streamed_s
from typer.testing import CliRunner

from millrace.cli.app import app
from millrace.config.tables.schedules import AReaL, Laminar, Synchronous
from millrace.config.tables.training import BatchShape
from millrace.core.errors import ConfigError
from millrace.core.types import Sampling, Work
from millrace_sim.compare import Interval, compare, schedules
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.measure import measure
from millrace_sim.roles.batching import BatchingEngine
from millrace_sim.setup import check_memory, cluster_of, scenario
from millrace_sim.simulation import Scale, simulate
from millrace_ui.simulated import simulated
from tests.long import long


def config(schedule=Laminar(), *, steps=9, **cluster) -> SimulatedConfig:
    section = {"model": "Qwen2.5-7B", "device": "H800", "trainer_devices": 4, "replicas": 4, "slots": 32}
    return SimulatedConfig(
        steps=steps,
        batch=BatchShape(prompts=8, group_size=8),
        schedule=schedule,
        cluster=ClusterSection(**{**section, **cluster}),
        lengths=LogNormalLengths(median=500, p99=4000),
        workload=WorkloadSection(prompt_tokens=(64, 256), max_tokens=4096),
    )


# ---------------------------------------------------------------- runs


def test_hosts_that_are_simulated_one_by_one_get_their_versions_down_the_chain():
    played = dataclasses.replace(scenario(config(hosts=4, steps=3)), scale=Scale(isolate=False))
    outcome = simulate(played)
    costs = cluster_of(config(hosts=4)).costs(1)
    last = [e["fetch_s"] for e in outcome.of("fetched") if e["host"] == "host-3"]
    assert last and last == pytest.approx([costs.fetch_s] * len(last), rel=0.1)


def test_replicas_on_devices_of_several_kinds_have_their_own_speed_and_share():
    few = {"steps": 4, "replicas": 2, "slots": 8}
    played = config(AReaL(eta=2), **few, other_replicas=[{"device": "A100", "replicas": 2}])
    mixed = scenario(played)
    assert played.cluster.all_replicas == mixed.config.rollout.replicas == 4
    (other,) = mixed.others
    assert other.costs.decode_step_s(8) > 1.3 * mixed.costs.decode_step_s(8)
    assert other.kv_capacity_tokens == other.costs.kv_capacity_units
    outcomes = [simulate(dataclasses.replace(mixed, scale=Scale(isolate=False))) for _ in range(2)]
    assert outcomes[0].digest == outcomes[1].digest
    started = Counter()
    for event in outcomes[0].of("leased"):
        started[event["replica"] in ("replica-2", "replica-3")] += len(event["trajectory_ids"])
    assert started[False] > 1.1 * started[True] > 0, "a free slot gets work, so the faster ones get more"


def test_other_devices_and_devices_in_turns_are_refused_together():
    with pytest.raises(ValueError, match=r"cluster\.other_replicas"):
        config(Synchronous(), colocated=True, other_replicas=[{"device": "H20", "replicas": 1}])


@pytest.mark.parametrize("wrong", [{"hosts": 5}, {"hosts": 2, "transport": "collective"}])
def test_hosts_without_relays_are_refused(wrong):
    with pytest.raises(ValueError, match=r"cluster\.hosts"):
        config(**wrong)


@long
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_comparison_tells_how_far_it_is(jobs):
    progress = []
    base = scenario(config(steps=3))
    compare(base, {"areal": AReaL(), "laminar": Laminar()}, seeds=1, jobs=jobs, on_progress=progress.append)
    versions = [1, 2, 3] if jobs == 1 else [3]
    names = ["areal", "laminar"]
    assert [(p.schedule, p.run, p.version) for p in progress] == [
        (n, i, v) for i, n in enumerate(names, 1) for v in versions
    ]
    assert all(p.steps == 3 and p.runs == 2 and p.virtual_s > 0 for p in progress)
    assert [p.share for p in progress] == sorted(p.share for p in progress) and progress[-1].share == 1


def test_the_command_tells_of_each_run_on_stderr_and_ends_with_a_verdict(tmp_path):
    (tmp_path / "c.toml").write_text(
        "steps = 3\n"
        "cluster = { model = 'Qwen2.5-7B', device = 'H800', replicas = 1, slots = 4 }\n"
        "batch = { prompts = 2, group_size = 2 }\n"
        "lengths = { kind = 'lognormal', median = 100, p99 = 400 }\n"
        "workload = { max_tokens = 512 }\n"
    )
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "c.toml"), "--compare", "areal,laminar"])
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "run 1 of 2, areal, seed 0",
        "run 2 of 2, laminar, seed 0",
    ]
    assert "step 3 of 3" in done.stderr and "virtual minutes" in done.stderr and "events" in done.stderr
    assert "is the fastest" in done.stdout.replace("\n", " ")


def test_a_synchronous_step_is_generation_then_training_and_wastes_both():
    result, timeline = measure(scenario(config(Synchronous())))
    assert result.staleness == {0: 1.0}
    assert result.trainer_busy + result.trainer_waits == pytest.approx(1.0, abs=0.1)
    assert result.trained_tokens_per_s == pytest.approx(result.generated_tokens_per_s, rel=0.3)
    assert set(timeline.samples) == {f"replica-{i}" for i in range(4)}


def test_asynchrony_beats_the_barrier_on_long_tails_and_stays_within_its_bound():
    barrier, _ = measure(scenario(config(Synchronous())))
    free, _ = measure(scenario(config(AReaL(eta=2))))
    assert free.step_s < 0.8 * barrier.step_s
    assert free.staleness_max <= 2
    assert 0 < free.staleness_mean <= 2


@long
def test_faster_devices_and_more_of_them_make_shorter_steps():
    slow, _ = measure(scenario(config(AReaL(eta=1), device="A100")))
    fast, _ = measure(scenario(config(AReaL(eta=1), device="H200")))
    many, _ = measure(scenario(config(AReaL(eta=1), device="H200", replicas=8, trainer_devices=8)))
    assert many.step_s < fast.step_s < slow.step_s


def test_the_same_seed_gives_the_same_result_and_another_seed_another():
    first, _ = measure(scenario(config()))
    assert measure(scenario(config()))[0] == first
    assert measure(scenario(config(), seed=5))[0] != first


def test_replicas_that_fail_are_replaced_and_the_run_ends():
    result, _ = measure(scenario(config(replica_mtbf_s=60.0)))
    assert result.restarts > 0
    assert result.steps >= 3


def test_what_does_not_fit_is_refused_with_what_to_raise():
    with pytest.raises(ConfigError, match="tensor parallel"):
        check_memory(config(model="Qwen2.5-72B"))
    with pytest.raises(ConfigError, match="trainer_devices"):
        check_memory(config(model="Qwen2.5-32B", trainer_devices=4, tensor_parallel=2))
    check_memory(config())


# ---------------------------------------------------------------- paged KV


def work(tid: int, tokens: int) -> Work:
    return Work(tid, tid, 1, [0] * 10, [], Sampling(tokens), seed=0)


def paged(capacity: int) -> BatchingEngine:
    workload = Workload(completion=LogNormal(80.0, 0.0))
    engine = BatchingEngine(
        slots=8, kv_capacity_tokens=capacity, keep_kv=False, costs=Costs(), workload=workload, paged=True
    )
    engine.swap(0, 0.0, 1.0)
    return engine


def test_a_paged_engine_admits_by_what_is_used_and_preempts_when_memory_runs_out():
    engine = paged(200)
    engine.submit([work(tid, 100) for tid in range(4)], 0.0, 1.0)
    assert engine.load().running == 4  # their largest KV would be 440
    highest = 0
    parts = []
    for tick in range(400):
        parts += engine.collect(0.01 * tick, 1.0)
        highest = max(highest, engine.load().kv_used_tokens)
    parts += engine.collect(100.0, 1.0)
    assert highest <= 200
    assert engine.load().prefilled_tokens > 4 * 10  # what was preempted was computed again
    lengths = {tid: sum(len(p.columns) for p in parts if p.trajectory_id == tid) for tid in range(4)}
    assert lengths == dict.fromkeys(range(4), 80)


# ---------------------------------------------------------------- pipelines


def pipelines(replicas=4, trainer_devices=4) -> Pipelines:
    planned = config(replicas=replicas, trainer_devices=trainer_devices)
    workload = Workload(prompt_tokens=(64, 256), completion=LogNormal(500.0, 0.9), quantum=16)
    batch = Batch(16, 8, 4096 // 16, workload)
    return Pipelines(cluster_of(planned).costs(16), replicas, 64, batch)


def test_overlap_helps_and_never_beats_its_longer_side():
    split = pipelines()
    longer = max(split.generation_s, split.train_s)
    assert longer < split.one_step() < split.generation_s + split.train_s + split.barrier_s
    assert longer < split.stream() <= split.generation_s + split.train_s + split.barrier_s
    assert split.colocated() == split.generation_s + split.train_s + split.barrier_s


def test_groups_of_a_batch_become_ready_in_order_and_all_of_them():
    ready = pipelines().ready_s
    assert len(ready) == 16
    assert ready == sorted(ready)
    assert ready[0] > 0


def test_streaming_trains_each_share_when_it_is_there():
    assert streamed_s([1.0, 2.0, 3.0, 10.0], 4.0, parts=4) == 11.0
    assert streamed_s([0.0, 0.0, 0.0, 0.0], 4.0, parts=4) == 4.0


def test_a_window_that_starts_more_waits_less():
    split = pipelines()
    strict, ahead = (split.windowed(staleness, split.train_s) for staleness in (0.0, 1.0))
    assert split.train_s < ahead < strict


# ---------------------------------------------------------------- comparison and page


def test_an_interval_over_seeds_is_students():
    estimate = Interval.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert Interval.of([5.0]) == Interval(5.0, 0.0)


def test_presets_are_compared_on_the_same_seeds_and_shown_on_one_page():
    base = scenario(config(steps=6))
    compared = compare(base, schedules(["synchronous", "areal"]), seeds=2)
    assert [(c.name, [r.seed for r in c.results]) for c in compared] == [
        ("synchronous", [0, 1]),
        ("areal", [0, 1]),
    ]
    text = simulated("two <schedules>", base, compared, [("synchronous", "1"), ("areal", "1")])
    assert "two &lt;schedules&gt;" in text
    assert "<b>6</b><span>optimizer steps" in text
    assert "<b>2</b><span>seeds of each schedule" in text
    assert text.count("<h2 ") == text.count('<section class="chart') == 6 + len(compared)
    assert text.count("<svg") == 3 and text.count('class="timeline"') == len(compared)
    assert len(text.encode()) < 2_000_000


def test_a_page_shows_fairness_where_enough_batches_are_measured():
    base = scenario(config(steps=16))
    compared = compare(base, schedules(["areal"]), seeds=1)
    known = compared[0].known("fairness")
    assert known is not None and known.mean > 0
    assert ">Fairness</h2>" in simulated("one", base, compared, [("areal",)])


def test_a_page_loads_nothing_from_elsewhere():
    found = []

    class References(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            references = [f"{tag} {value}" for name, value in attrs if name in ("src", "href")]
            found.extend(one for one in references if one != "link data:," and not one.startswith("a #"))

    base = scenario(config(steps=3))
    References().feed(simulated("one", base, compare(base, schedules(["areal"]), seeds=1), [("areal",)]))
    assert not found


def test_unknown_presets_are_refused_by_name():
    with pytest.raises(ConfigError, match="laminar"):
        schedules(["lamina"])
    assert len(schedules(["presets"])) == 12


# ---------------------------------------------------------------- command


TOML = """
steps = 6
schedule = "synchronous"
[batch]
prompts = 4
group_size = 4
[cluster]
model = "Qwen2.5-7B"
device = "H100"
trainer_devices = 2
replicas = 2
[lengths]
median = 200
p99 = 1000
[workload]
max_tokens = 1024
"""


def run(*arguments: str):
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_simulate_prints_json_and_writes_a_page(tmp_path):
    file, html = tmp_path / "cluster.toml", tmp_path / "page.html"
    file.write_text(TOML)
    answer = run(str(file), "--json", "--html", str(html), "--compare", "synchronous,laminar")
    assert answer.exit_code == 0, answer.output
    comparison = json.loads(answer.stdout)
    assert set(comparison) == {"synchronous", "laminar"}
    assert comparison["laminar"]["estimates"]["step_s"]["mean"] > 0
    assert html.read_text().startswith("<!doctype html>")


def test_simulate_prints_a_table(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(TOML)
    answer = run(str(file), "--set", "cluster.replicas=3")
    assert answer.exit_code == 0, answer.output
    assert "synchronous" in answer.stdout


def test_chaos_says_how_many_seeds_failed():
    answer = run("--chaos", "2", "--seed", "7")
    assert answer.exit_code == 0, answer.output
    assert "Seeds 7 to 8: 0 failed" in answer.stdout


def test_simulate_without_anything_to_simulate_says_what_it_needs():
    answer = run()
    assert isinstance(answer.exception, ConfigError)
    assert "--from RUN" in str(answer.exception)
