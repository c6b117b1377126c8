"""Layouts that fit, the order of the search, and what a plan says."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.cli import app
from millrace.config.load import load, load_as
from millrace.config.tables import schedules
from millrace.config.tables.schedules import AReaL
from millrace.core.errors import ConfigError
from millrace_sim.config import PlanConfig
from millrace_sim.costs.hardware import device
from millrace_sim.costs.models import model
from millrace_sim.measure import ReplicaSample, Result, TimedWork, Timeline
from millrace_sim.plan import ranking
from millrace_sim.plan.layouts import Demand, generate_s, layout_generate_s, layouts, layouts_in_turns
from millrace_sim.plan.planned import PLACEHOLDERS, beyond, configuration
from millrace_sim.plan.ranking import CheckpointPlan
from millrace_sim.plan.search import Candidate, Simulated, for_batch, search, simulated_config
from millrace_sim.plan_command import timeline_lines

DEMAND = Demand(samples=256, prompt_tokens=512, completion_tokens=1000, longest=4096)
QUESTION = PlanConfig.model_validate(
    {
        "model": "Qwen2.5-7B",
        "devices": {"H100": 16},
        "batch": {"prompts": (16, 32), "group_size": 16},
        "workload": {"prompt_tokens": (512, 512), "max_tokens": 3584},
        "search": {"simulations": 20},
    }
)
RESULT = Result(
    schedule="laminar", seed=0, steps=6, step_s=10.0, trained_tokens_per_s=1000.0,
    generated_tokens_per_s=1000.0,
    trainer_busy=0.9, trainer_waits=0.05, replica_busy=0.5, kv_used=0.3, staleness_mean=1.0, staleness_max=2,
    repacks=0, pulls=10, restarts=0, virtual_s=60.0,
)  # fmt: skip
CHECKPOINTS = CheckpointPlan(every=39, interval_s=1700.0, loss=0.001, mtbf_s=1.4e6)


def found():
    return layouts(model("Qwen2.5-7B"), {device("H100"): 16}, DEMAND)


def test_every_layout_fits_and_stays_within_the_devices():
    assert len(found()) > 20
    for layout in found():
        assert sum(layout.used().values()) <= 16
        assert layout.training.fits(DEMAND.longest)
        assert layout.slots * DEMAND.longest <= layout.generation.kv_capacity_tokens
    steps = [layout.step_s for layout in found()]
    assert steps == sorted(steps), "the best prediction comes first"


def test_the_best_split_balances_both_sides():
    best = found()[0]
    assert best.train_s == pytest.approx(best.generate_s, rel=0.6)


def test_on_a_mixed_cluster_the_fast_compute_trains_and_the_bandwidth_generates():
    devices = {device("H800"): 32, device("H20"): 32}
    best = layouts(model("Qwen2.5-7B"), devices, DEMAND)[0]
    assert (best.training.device.name, best.generation.device.name) == ("H800", "H20")


def test_what_is_left_of_the_trainers_kind_generates_too():
    devices = {device("H800"): 9, device("H20"): 8}
    found = [one for one in layouts(model("Qwen2.5-7B"), devices, DEMAND) if one.other is not None]
    assert found
    for one in found:
        assert all(num <= devices[device(name)] for name, num in one.used().items())
        alone = generate_s(one.generation, one.replicas, one.slots, DEMAND)
        assert one.generate_s == layout_generate_s(one, DEMAND) < alone
    simulated, _ = simulated_config(QUESTION, Candidate(found[0], 512, AReaL(eta=1)))
    (other,) = simulated.cluster.other_replicas
    assert other.device == found[0].training.device.name
    assert simulated.cluster.all_replicas == found[0].replicas + found[0].other_replicas


def mixed_layout():
    devices = {device("H800"): 9, device("H20"): 8}
    return next(one for one in layouts(model("Qwen2.5-7B"), devices, DEMAND) if one.other is not None)


def test_in_proportion_the_other_replicas_are_rounded_to_the_nearest_number():
    layout = replace(mixed_layout(), replicas=64)
    layout = replace(layout, training=replace(layout.training, devices=64))
    for num, simulated_num in ((1, ()), (3, (1,)), (7, (2,)), (9, (2,))):
        candidate = Candidate(replace(layout, other_replicas=num), 256, AReaL(eta=1))
        config, scale = simulated_config(QUESTION, candidate)
        assert scale == 4
        assert tuple(kind.replicas for kind in config.cluster.other_replicas) == simulated_num


def test_a_round_of_laminar_is_a_share_of_all_replicas():
    run, asked = run_that_prefers(lambda candidate: False)
    layout = replace(mixed_layout(), replicas=4, other_replicas=12)
    search(QUESTION, DEMAND, [layout], run)
    rounds = {(c.prompts, getattr(c.schedule, "round_groups", None)) for c in asked}
    assert (16, 2) in rounds and (16, 8) not in rounds, "twice 16 prompts by 16 replicas"


def test_no_replica_gets_more_slots_than_its_kv_holds():
    devices = {device("H800"): 9, device("H20"): 8}
    fitting = layouts(model("Qwen2.5-7B"), devices, DEMAND)
    mixed = next(one for one in fitting if one.other is not None and one.slots == 128)
    run, asked = run_that_prefers(lambda candidate: False)
    search(QUESTION, DEMAND, [mixed], run)
    assert {candidate.layout.slots for candidate in asked} == {64, 128}
    one = replace(mixed, other=replace(mixed.other, tensor_parallel=2 * mixed.generation.tensor_parallel))
    (line,) = beyond(Simulated(Candidate(one, 32, AReaL()), RESULT, Timeline(), scale=1))[:1]
    assert "`rollout.tensor`" in line


def run_that_prefers(better):
    """A simulator whose throughput is 2 for what is preferred, 1 otherwise; and what it was asked."""
    asked = []

    def run(candidate):
        asked.append(candidate)
        speed = 2000.0 if better(candidate) else 1000.0
        result = replace(RESULT, trained_tokens_per_s=speed)
        return Simulated(candidate, result, Timeline(), scale=1)

    return run, asked


@pytest.mark.parametrize(
    "better",
    [
        lambda c: c.prompts == 32,
        lambda c: c.schedule.kind == "areal",
        lambda c: c.layout.training.devices == found()[0].training.devices + 1,
        lambda c: getattr(c.schedule, "batch_max", None) is not None,
    ],
)
def test_the_search_finds_what_is_better_in_one_respect(better):
    run, asked = run_that_prefers(better)
    ranking = search(QUESTION, DEMAND, found(), run)
    assert better(ranking[0].candidate)
    assert len(asked) == len({candidate.key for candidate in asked}) <= 20, "nothing is simulated twice"


def test_the_search_keeps_its_budget():
    question = QUESTION.model_copy(update={"search": QUESTION.search.model_copy(update={"simulations": 3})})
    run, asked = run_that_prefers(lambda candidate: False)
    assert len(search(question, DEMAND, found(), run)) == len(asked) == 3


def test_nothing_that_fits_is_an_error():
    with pytest.raises(ConfigError, match="no layout"):
        search(QUESTION, DEMAND, layouts(model("Llama-3.1-405B"), {device("H100"): 8}, DEMAND), print)


def test_a_large_plan_is_simulated_in_proportion():
    layout = replace(found()[0], replicas=64)
    layout = replace(layout, training=replace(layout.training, devices=64))
    config, scale = simulated_config(QUESTION, Candidate(layout, 256, schedules.Laminar()))
    assert (scale, config.cluster.replicas, config.cluster.trainer_devices, config.batch.prompts) == (
        4, 16, 16, 64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("waits", "busy", "says"),
    [(0.05, 0.5, "the trainer"), (0.4, 0.95, "generation"), (0.4, 0.5, "the long tail")],
)
def test_the_bottleneck_is_the_side_that_the_other_waits_for(waits, busy, says):
    result = replace(RESULT, trainer_waits=waits, replica_busy=busy)
    assert ranking.bottleneck(result).startswith(says)


def test_one_more_device_helps_only_where_it_is_short():
    devices = {device("H800"): 32, device("H20"): 8, device("A100"): 8}
    layout = next(
        one
        for one in layouts(model("Qwen2.5-7B"), devices, DEMAND)
        if (one.training.device.name, one.generation.device.name) == ("H800", "H20")
        and one.generate_s > 1.5 * one.train_s
        and one.other is None
    )
    candidate = Candidate(layout, 16, schedules.Laminar())
    best = Simulated(candidate, RESULT, Timeline(), scale=1)
    gains = {gain.device: gain for gain in ranking.gains(devices, DEMAND, QUESTION, best)}
    generators = layout.replicas * layout.generation.tensor_parallel
    assert gains["H20"].throughput == pytest.approx(1 / generators, rel=0.01)
    assert gains["H800"].throughput == 0
    assert gains["A100"].role == "idle in this plan"


def test_one_more_device_helps_beside_other_replicas_by_its_own_share():
    layout = replace(mixed_layout(), replicas=2, other_replicas=1)
    devices = {layout.training.device: 9, layout.generation.device: 8}
    best = Simulated(Candidate(layout, 16, schedules.Laminar()), RESULT, Timeline(), scale=1)
    layout = for_batch(layout, 16, QUESTION, DEMAND)
    assert layout.generate_s > layout.train_s
    found = {gain.device: gain for gain in ranking.gains(devices, DEMAND, QUESTION, best)}
    one_more = {
        layout.generation.device.name: replace(layout, replicas=layout.replicas + 1),
        layout.training.device.name: replace(layout, other_replicas=layout.other_replicas + 1),
    }
    assert (layout.generation.tensor_parallel, layout.other.tensor_parallel) == (1, 1)
    for name, more in one_more.items():
        assert found[name].role == "generation"
        expected = layout.generate_s / layout_generate_s(more, DEMAND) - 1
        assert found[name].throughput == pytest.approx(expected, rel=1e-6)


def test_a_timeline_shows_steps_waits_and_busy_replicas():
    timeline = Timeline(
        samples={"replica-0": [ReplicaSample(t + 0.5, 0, 1, 1.0 if t < 5 else 0.0, 0.1) for t in range(10)]},
        trainer=[TimedWork(0, 4, "step", 1), TimedWork(6, 10, "step", 2)],
    )
    lines = dict(timeline_lines(timeline, width=10))
    assert lines["trainer"] == "████··████"
    assert lines["version"] == "    1    2"
    assert lines["replica-0"] == "█████     "


def question(devices: int, staleness_max: int, **changes: object) -> PlanConfig:
    base = QUESTION.model_dump(mode="json") | {"devices": {"H100": devices}, "staleness_max": staleness_max}
    search_of = {"simulations": 4, "steps": 4}
    return PlanConfig.model_validate(base | {"batch": {"prompts": [8]}, "search": search_of} | changes)


def test_where_both_sides_do_not_fit_beside_each_other_the_plan_is_in_turns():
    devices = {device("H100"): 2}
    assert not layouts(model("Qwen2.5-7B"), devices, DEMAND)
    assert all(one.used() == {"H100": 2} for one in layouts_in_turns(model("Qwen2.5-7B"), devices, DEMAND))
    answer = ranking.plan(question(2, 0))
    assert answer.best.candidate.layout.colocated
    config = tomllib.loads(configuration(answer, PLACEHOLDERS))
    assert config["rollout"]["colocated"] and config["schedule"]["kind"] == "synchronous"


def test_at_staleness_0_turns_win_where_generation_takes_most_of_the_time():
    long = {"lengths": {"kind": "lognormal", "median": 1500.0, "p99": 2500.0}, "model": "Qwen2.5-1.5B"}
    best = ranking.plan(question(2, 0, **long)).best
    assert best.candidate.layout.colocated


def test_turns_are_for_one_host():
    assert not layouts_in_turns(model("Qwen2.5-7B"), {device("H100"): 16}, DEMAND)


def test_the_example_is_a_valid_question():
    config = load_as(PlanConfig, Path(__file__).parents[2] / "examples" / "plan.toml")
    assert ranking.devices_of(config)


def test_the_planned_configuration_is_one_that_train_accepts(tmp_path):
    layout = found()[0]
    best = Simulated(Candidate(layout, 32, schedules.AReaL(eta=3)), RESULT, Timeline(), scale=1)
    answer = ranking.Plan(QUESTION, DEMAND, [], 1, [best], "the trainer", [], CHECKPOINTS)
    file = tmp_path / "planned.toml"
    file.write_text(configuration(answer, PLACEHOLDERS))
    assert "path/to/rows.jsonl" in file.read_text()  # a placeholder, which `train` refuses: there is no file
    config = load(file)
    assert (config.batch.prompts, config.schedule.kind, config.staleness_bound) == (32, "areal", 3)
    assert (config.rollout.replicas, config.rollout.slots) == (layout.replicas, layout.slots)
    assert config.sampling.max_tokens == 3584
    assert config.checkpoints.every == 39
    assert config.trainer.ranks == layout.training.devices
    assert config.trainer.tensor == layout.training.model_parallel


def test_a_replica_of_several_devices_has_its_keys_in_the_planned_configuration():
    layout = next(one for one in found() if one.generation.tensor_parallel > 1)
    best = Simulated(Candidate(layout, 32, schedules.AReaL()), RESULT, Timeline(), scale=1)
    answer = ranking.Plan(QUESTION, DEMAND, [], 1, [best], "the trainer", [], CHECKPOINTS)
    config = tomllib.loads(configuration(answer, PLACEHOLDERS))
    assert config["rollout"]["tensor"] == layout.generation.tensor_parallel
    assert config["rollout"]["engine"] == "vllm"
    assert config["model"]["dtype"] == "bfloat16"


def test_a_plan_says_what_of_it_no_key_says():
    for layout in found():
        lacks = beyond(Simulated(Candidate(layout, 32, schedules.AReaL()), RESULT, Timeline(), scale=1))
        hosts = layout.training.devices + layout.replicas * layout.generation.tensor_parallel > 8
        assert any("runtime.kind" in line for line in lacks) == hosts
        assert any("generation in" in line for line in lacks) == (layout.generation.dtype != "bf16")


def test_the_documented_answer_is_what_the_command_prints(monkeypatch, capsys):
    """Where this fails, `millrace plan examples/plan-host.toml` prints what docs/planning.md should show, and
    examples/planned-host.toml."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    assert app.run(["plan", "examples/plan-host.toml"]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines())
    answer, configuration = printed.split("\n\nIts configuration:\n\n")
    page = (root / "docs" / "planning.md").read_text()
    assert f"```text\n{answer}\n```" in page
    assert (root / "examples" / "planned-host.toml").read_text() == f"{configuration}\n"
