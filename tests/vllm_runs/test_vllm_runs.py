"""Whole runs whose replicas generate with vLLM, by the interpreter that `make setup-vllm` made."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.runs import events, make_start, summary, train
from tests.serving import LONG, PYTHON, WITH_VLLM

from millrace.config.schema import Config
from millrace.core.events import Event
from millrace.diagnose.examine import examine
from millrace.diagnose.weights import EXPECTED
from millrace.runtime import process
from millrace.schedule import Schedule, View, presets
from millrace.schedule.view import RepackOrder

VLLM = (
    "rollout.engine=vllm",
    f"rollout.python={PYTHON}",
    "rollout.exact=false",
    "supervision.heartbeat_timeout_s=60",
)
STEPWISE = "rollout.stepwise=true"

pytestmark = WITH_VLLM


class Killer:
    """A sink that sends SIGKILL to the first replica that is in the middle of its work, or to `rank` of its
    engine alone."""

    def __init__(self, rank: int | None = None) -> None:
        self._rank = rank
        self._pids: dict[str, int] = {}
        self.killed: str | None = None

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if event.kind == "worker_started" and fields["role"] == "replica":
            self._pids[fields["name"]] = fields["pid"]
        in_the_middle = event.kind == "report" and fields["running"] and fields["steps_since_swap"] > 4
        if in_the_middle and self.killed is None:
            self.killed = fields["replica"]
            os.kill(self._victim(self._pids[self.killed]), signal.SIGKILL)

    def _victim(self, replica: int) -> int:
        if self._rank is None:
            return replica
        named = f"Worker_TP{self._rank}"
        titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in process.descendants(replica)}
        (rank,) = (pid for pid, title in titles.items() if named in title)
        return rank


@pytest.mark.parametrize("rank", [None, 1], ids=["replica", "rank"])
@pytest.mark.parametrize("schedule", ["{kind='laminar', staleness_max=2}", "{kind='areal'}"])
def test_a_replica_that_is_killed_in_mid_generation_loses_nothing(
    schedule: str, rank: int | None, start: Path, tmp_path: Path
) -> None:
    """The relay holds every version, so that one to go on under is never gone."""
    killer = Killer(rank)
    more = ("weights.slots=5",) if rank is None else ("weights.slots=5", "rollout.tensor=2")
    run = train(start, tmp_path / "run", *VLLM, *LONG, *more, f"schedule={schedule}", sinks=(killer,))
    causes = [e.fields["cause"] for e in events(run, "worker_died") if e.fields["name"] == killer.killed]
    assert ["VllmWorker-1" in cause for cause in causes] == [rank is not None]
    assert sum(e.fields["resumed_tokens"] for e in events(run, "leased")) > 0
    computes = {e.fields["name"]: e.fields["computes"] for e in events(run, "computes")}
    assert "vLLM" in computes["replica-0"] and "vLLM" in computes["replica-1"]
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 64 and accounting["failed"] == 0
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4


class KillerOfVllm(Killer):
    """Sends SIGKILL to vLLM's own process, and not to its replica."""

    def _victim(self, replica: int) -> int:
        titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in process.children(replica)}
        (core,) = (pid for pid, title in titles.items() if "EngineCore" in title)
        return core


def test_vllms_process_that_is_killed_is_told_and_a_run_without_seeds_loses_nothing(
    start: Path, tmp_path: Path
) -> None:
    killer = KillerOfVllm()
    more = ("weights.slots=5", "rollout.seeded=false")
    run = train(start, tmp_path / "run", *VLLM, *LONG, *more, "schedule={kind='areal'}", sinks=(killer,))
    causes = [e.fields["cause"] for e in events(run, "worker_died") if e.fields["name"] == killer.killed]
    assert any("EngineCore" in cause and "SIGKILL" in cause for cause in causes)
    computes = {e.fields["name"]: e.fields["computes"] for e in events(run, "computes")}
    assert all(
        "without seeds a resumed trajectory samples anew" in computes[f"replica-{i}"] for i in range(2)
    )
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 64 and accounting["failed"] == 0
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4


@dataclass(frozen=True)
class Whenever:
    """Repack: the first replica hands all that it samples to the second, as soon as that is possible."""

    interval_s: float = 0.05

    def moves(self, view: View) -> list[RepackOrder]:
        samples = [r for r in view.replicas if r.serving and r.running and r.steps_since_swap > 4]
        if len(samples) < 2 or samples[0].version != samples[1].version:
            return []
        return [RepackOrder(samples[0].replica_id, {samples[1].replica_id: samples[0].load})]

    def describe(self) -> str:
        return "whenever two replicas sample under one version"


def moving(config: Config) -> Schedule:
    """Laminar's published repack waits until both replicas ramp down, which a short run may not see."""
    laminar = presets.laminar(staleness_max=2, round_groups=2, batch_max=None, repack=None)
    return replace(laminar, repack_rule=Whenever())


def test_a_repack_moves_work_between_replicas_in_mid_generation(start: Path, tmp_path: Path) -> None:
    schedule = f"schedule={{kind='function', path='{__file__}:moving', staleness_max=2}}"
    run = train(start, tmp_path / "run", *VLLM, *LONG, "rollout.slots=16", "steps=8", schedule)
    moved = events(run, "moved")
    assert moved and all(e.fields["source"] != e.fields["destination"] for e in moved)
    assert sum(e.fields["resumed_tokens"] for e in events(run, "leased")) > 0
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 128 and accounting["failed"] == accounting["abandoned"] == 0
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that the torch engine does not run. Every second layer has short windows."""
    from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig

    path = make_start(tmp_path_factory.mktemp("gemma"), head_dim=32)
    shared = ("vocab_size", "eos_token_id", "pad_token_id", "num_attention_heads", "num_key_value_heads")
    tokens = AutoConfig.from_pretrained(path.parent / "start")
    config = Gemma3TextConfig(
        **{name: getattr(tokens, name) for name in shared},
        bos_token_id=None,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=64,
    )
    Gemma3ForCausalLM(config).save_pretrained(path.parent / "start")
    return path


def test_gemma_is_trained_with_replicas_of_vllm(gemma: Path, tmp_path: Path) -> None:
    run = train(gemma, tmp_path / "run", *VLLM, STEPWISE, "rollout.replicas=1", "optimizer.lr=1e-2")
    pulled = [event.fields["version"] for event in events(run, "pulled")]
    assert pulled[0] == 0 and pulled[-1] >= 3, "every load is proved"
    assert summary(run)["accounting"]["trained"] == 64
    assert len({event.fields["metrics"]["grad_norm"] for event in events(run, "step")} - {0.0}) == 4
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4


@pytest.mark.parametrize(
    "how",
    [
        ("adapter.kind=dora",),
        ("rollout.native_adapters=true",),
        ("rollout.native_adapters=true", STEPWISE),
    ],
    ids=["merged", "native", "native stepwise"],
)
def test_an_adapter_is_trained_with_replicas_of_vllm(
    how: tuple[str, ...], start: Path, tmp_path: Path
) -> None:
    """Merged: vLLM gets whole weights, made from the model's files and the adapter that the relay holds.
    Native: it gets the adapter."""
    adapter = ("adapter.rank=4", "optimizer.lr=1e-2", *how)
    killer = Killer()
    run = train(start, tmp_path / "run", *VLLM, *LONG, *adapter, "weights.slots=5", sinks=(killer,))
    digests = {e.fields["version"]: e.fields["digest"] for e in events(run, "published")}
    pulled = events(run, "pulled")
    assert killer.killed and max(e.fields["version"] for e in pulled) >= 2
    assert all(digests[e.fields["version"]] == e.fields["digest"] for e in pulled)
    computes = {e.fields["computes"] for e in events(run, "computes") if e.fields["name"] != "trainer"}
    assert all(("adapters beside" in text) == ("rollout.native_adapters=true" in how) for text in computes)
    model = (start.parent / "start" / "model.safetensors").stat().st_size
    assert all(e.fields["weights_bytes"] < model / 2 for e in events(run, "published"))
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 64 and accounting["failed"] == 0
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4


@pytest.mark.parametrize(
    "how", [(), ("adapter.rank=4", "rollout.native_adapters=true")], ids=["whole", "native adapters"]
)
def test_versions_are_evaluated_with_vllm_beside_the_training(
    how: tuple[str, ...], start: Path, tmp_path: Path
) -> None:
    asked = 'evaluations=[{name="held-out", every=2, prompts=6, samples=2, by="reward", share=1.0}]'
    run = train(start, tmp_path / "run", *VLLM, *how, "rollout.replicas=1", asked)
    done = {e.fields["version"]: e.fields["metrics"] for e in events(run, "evaluated")}
    skipped = {e.fields["version"] for e in events(run, "evaluation_skipped")}
    assert sorted(done.keys() | skipped) == [0, 2, 4] and 4 in done
    assert all(metrics["num_unscored"] == 0 for metrics in done.values())
    computes = {e.fields["name"]: e.fields["computes"] for e in events(run, "computes")}
    assert "vLLM" in computes["evaluator"]
    assert summary(run)["accounting"]["trained"] == 64


@pytest.mark.parametrize("stepwise", ["true", "false"])
def test_a_run_in_turns_trains_every_trajectory_once(stepwise: str, start: Path, tmp_path: Path) -> None:
    """Unfinished trajectories wait over the turns of the trainer."""
    schedule = ("rollout.colocated=true", "schedule={kind='areal', eta=1}", "rollout.replicas=1")
    run = train(start, tmp_path / "run", *VLLM, *LONG, *schedule, f"rollout.stepwise={stepwise}")
    turns = [event.fields["name"] for event in (*events(run, "slept"), *events(run, "woke"))]
    assert turns.count("trainer") >= 2 * 4 and turns.count("replica-0") >= 2 * 4
    assert max(event.fields["staleness_max"] for event in events(run, "step")) <= 1
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 64 and accounting["failed"] == 0
    assert events(run, "worker_died") == []
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4


def test_a_run_with_quantised_replicas_closes_its_accounts_and_tells_the_gap(
    start: Path, tmp_path: Path
) -> None:
    rounded = ("model.dtype=bfloat16", "rollout.quantization=fp8", "rollout.replicas=1", "optimizer.lr=1e-2")
    run = train(start, tmp_path / "run", *VLLM, STEPWISE, *rounded)
    computes = {e.fields["name"]: e.fields["computes"] for e in events(run, "computes")}
    assert computes["replica-0"].startswith("bfloat16, matrices in fp8")
    published = {e.fields["version"]: e.fields["digest"] for e in events(run, "published")}
    pulled = events(run, "pulled")
    assert max(e.fields["version"] for e in pulled) >= 3, "every load is proved"
    assert all(published[e.fields["version"]] == e.fields["digest"] for e in pulled)
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 64 and accounting["failed"] == 0
    record = examine(run)
    assert record["dtype"] == "fp8" and record["findings"] == []
    assert 1e-3 < summary(run)["logprob_gap_staleness0"]["mean"] < EXPECTED["fp8"]


@pytest.mark.parametrize("drafts", ["ngram", "suffix"])
def test_a_run_with_drafts_of_vllm_closes_its_accounts(drafts: str, start: Path, tmp_path: Path) -> None:
    if drafts == "suffix" and not [*PYTHON.parents[1].glob("lib/python*/site-packages/arctic_inference")]:
        pytest.skip("`make setup-vllm` could not build arctic-inference")
    drafting = (f"rollout.drafts={drafts}", "rollout.seeded=false", "rollout.draft_rows_max=64")
    run = train(start, tmp_path / "run", *VLLM, *LONG, *drafting, "sampling.temperature=0.4")
    reports = {event.fields["replica"]: event.fields for event in events(run, "report")}
    drafted = sum(report["drafted_tokens"] for report in reports.values())
    accepted = sum(report["accepted_tokens"] for report in reports.values())
    assert 0 < accepted < drafted
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 64 and accounting["failed"] == 0
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4
