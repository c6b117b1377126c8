"""Keys combined: what passes validation and the checks of `train` makes a run that gets to its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from tests.long import long

from millrace.checks import derived
from millrace.checks.preflight import preflight
from millrace.config.freeze import dump
from millrace.config.load import read_file, validate
from millrace.config.schema import Config
from millrace.config.tree import leaves
from millrace.core.errors import MillraceError
from millrace.core.placement import Host
from millrace.core.types import BadPrompt, Prompt
from millrace.episodes.first_look import FirstLook
from millrace.run import compose
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.simulation import Scale, Scenario, simulate

GB = 10**9
LEAVES = list(leaves(Config))
TRACKERS = ("wandb", "mlflow", "trackio")
SIMULATED = ("batch.", "checkpoints.", "reward.timeout_s", "rollout.", "sampling.", "schedule.", "steps")
SIMULATED += ("supervision.", "weights.")
ELSEWHERE = ("model.path", "rollout.python", "observe.prometheus", *(f"observe.{name}" for name in TRACKERS))
"""Keys whose values are files, programs or services: other tests have those."""
MODEST = (2, 3, 5, 8, 16, 33, 64, 1000, 0.01, 0.5, 1.0, 5.0, 30.0)
STEPS_MAX, TOKENS_MAX = 3, 20_000
"""Of a run that is simulated, and of one of its steps: more take long, and tell nothing else."""

fixed = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def edges(schema: dict[str, Any]) -> Iterator[Any]:
    """Values at the ends of what a JSON schema allows, and modest ones between."""
    for option in schema.get("anyOf", ()):
        yield from edges(option)
    yield from schema.get("enum", ())
    match schema.get("type"):
        case "null":
            yield None
        case "boolean":
            yield from (False, True)
        case "string":
            yield from ("", "x", "{prompt}", "prompt")
        case "array" if "prefixItems" in schema:
            yield from ([0.0, 0.0], [0.9, 0.999999])
        case "array":
            yield from ([], ["a"], ["a", "xyz"])
        case "object":
            yield {}
        case "integer" | "number" as kind:
            yield from _numbers(schema, kind)


def _numbers(schema: dict[str, Any], kind: str) -> Iterator[float]:
    least = 1 if kind == "integer" else 1e-9
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + least)
    high = schema.get("maximum", schema.get("exclusiveMaximum", 1) - least)
    between = [x for x in MODEST if low <= x <= high and (kind == "number" or isinstance(x, int))]
    yield from (low, low + least, *between, high)


def values(field: FieldInfo) -> st.SearchStrategy[Any]:
    annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return st.sampled_from(list(edges(TypeAdapter(annotation).json_schema())))


@st.composite
def combinations(draw: st.DrawFn, keys: tuple[str, ...] = ("",)) -> dict[str, Any]:
    """Two to four keys with values; `TABLE.kind` where they belong to a kind."""
    able = [leaf for leaf in LEAVES if leaf[0].startswith(keys) and not leaf[0].endswith(".path")]
    able = [leaf for leaf in able if leaf[0] not in ELSEWHERE]
    changes: dict[str, Any] = {}
    for key, kind, field in draw(st.lists(st.sampled_from(able), min_size=2, max_size=4, unique_by=id)):
        table = key.partition(".")[0]
        if kind is None or changes.setdefault(f"{table}.kind", kind) == kind:
            changes[key] = draw(values(field))
    return changes


@pytest.fixture(scope="module")
def base(start: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small run that works; beside its model are rows, a reward, an algorithm and a schedule."""
    directory = tmp_path_factory.mktemp("own")
    words = ("stone", "river", "maple", "otter")
    rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in words]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "own.py").write_text(
        "from millrace.schedule.presets import areal\n"
        "def reward(completion, answer):\n    return float(completion == answer)\n"
        f"def rows():\n    return {rows}\n"
        "def schedule(config):\n    return areal(eta=1)\n"
    )
    return read_file(Config, start).tree | {"own": str(directory)}


def tree_of(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    tree = json.loads(json.dumps(base))
    own = tree.pop("own")
    needed = {
        "task.file": {"path": f"{own}/rows.jsonl"},
        "task.function": {"path": f"{own}/own.py:rows"},
        "task.gym": {"name": "spell_backward"},
        "reward.function": {"path": f"{own}/own.py:reward"},
        "algorithm.function": {"path": f"{own}/own.py:reward"},
        "schedule.function": {"path": f"{own}/own.py:schedule"},
    }
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        inner = tree.setdefault(table, {}) if table else tree
        if name == "kind" and inner.get("kind") != value:
            tree[table] = {"kind": value, **needed.get(f"{table}.{value}", {})}
        elif name != "kind":
            inner[name] = value
    if tree["task"]["kind"] != "gym" and tree["reward"]["kind"] == "gym":
        tree["reward"] = {"kind": "function", **needed["reward.function"]}
    return tree


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "read_host", lambda: Host("small", 4, 16 * GB, 12 * GB))


def checked(tree: dict[str, Any], runs: Path) -> Config | None:
    """As `train` checks before it starts a process; None: it was refused, and said why."""
    try:
        config = validate(Config, tree, {})
        preflight(config, runs)
    except MillraceError as refusal:
        assert len(str(refusal)) > 20, refusal
        return None
    return config


@settings(fixed, max_examples=20)
@given(changes=combinations())
@pytest.mark.usefixtures("small_host")
def test_keys_combined_are_refused_in_words_or_give_a_first_prompt(
    base: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    refused_or_prompted(base, tmp_path, changes)


@long
@settings(fixed, max_examples=100)
@given(changes=combinations())
@pytest.mark.usefixtures("small_host")
def test_more_keys_combined_are_refused_in_words_or_give_a_first_prompt(
    base: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    refused_or_prompted(base, tmp_path, changes)


def refused_or_prompted(base: dict[str, Any], tmp_path: Path, changes: dict[str, Any]) -> None:
    config = checked(tree_of(base, changes), tmp_path)
    if config is None:
        return
    assert derived.derived(config)
    assert validate(Config, dump(config), {}) == config
    try:
        prompt = asyncio.run(_first_prompt(FirstLook(dump(config), limit_memory=False)))
    except MillraceError as refusal:
        assert len(str(refusal)) > 20, refusal
    else:
        assert isinstance(prompt, Prompt) or prompt.reason


async def _first_prompt(worker: FirstLook) -> Prompt | BadPrompt:
    return await anext(worker.probed(0, any_usable=False))


@settings(fixed, max_examples=40)
@given(changes=combinations(SIMULATED))
@pytest.mark.usefixtures("small_host")
def test_keys_combined_are_refused_in_words_or_get_to_the_last_step(
    base: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = checked(tree_of(base, changes), tmp_path)
    if config is None or config.trajectories_per_step * config.sampling.max_tokens > TOKENS_MAX:
        return
    config = config.model_copy(update={"steps": min(config.steps, STEPS_MAX)})
    lengths = LogNormal(median=8.0, sigma=0.5)
    outcome = simulate(
        Scenario(
            config,
            workload=Workload(prompt_tokens=(4, 8), completion=lengths),
            scale=Scale(isolate=False, keep_events=frozenset({"step", "worker_died"})),
        )
    )
    assert len(outcome.of("step")) == config.steps and not outcome.of("worker_died")
