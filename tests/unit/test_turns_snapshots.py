"""An episode whose worker is lost goes on from its last snapshot, or fails with the reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.test_turns_episodes import Counter, request, tokenizer

from millrace.core.completion.columns import token_array
from millrace.core.errors import RewardError
from millrace.core.types import Failed, Observed, Scored
from millrace.episodes.bridge import PlainBridge
from millrace.episodes.environment import Budgets, Done, Observation
from millrace.episodes.episodes import Episodes
from millrace.episodes.forms import load_environment
from millrace.episodes.snapshots import Snapshots, stream_of, sweep

__all__ = ["tokenizer"]


class Restored(Counter):
    """Answers with a number that no action gives."""

    recovery = "restored"
    number = 0

    def step(self, action: str) -> Observation | Done | str:
        type(self).number += 1
        self.mine = getattr(self, "mine", 0) or type(self).number
        return Done(1.0) if "stop" in action else Observation(f"<{self.mine}>", reward=0.25)

    def snapshot(self) -> bytes:
        return str(self.mine).encode()

    def restore(self, row: dict[str, Any], snapshot: bytes) -> None:
        self.mine = int(snapshot)


def worker(
    tokenizer: Any,
    run_dir: Path | None,
    kind: Any = Restored,
    size: int = 100,
    stream: str = "training",
) -> Episodes:
    return Episodes(
        kind,
        name="env",
        file=None,
        bridge=PlainBridge(tokenizer),
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        budgets=Budgets(8),
        snapshots=Snapshots(run_dir, size, stream),
        timeout_s=60.0,
        trial=run_dir is None,
    )


def files(run_dir: Path) -> list[Path]:
    return sorted(path for path in (run_dir / "snapshots").rglob("*") if path.is_file())


def observed(tokenizer: Any, answer: Any) -> str:
    assert isinstance(answer, Observed), answer
    return str(tokenizer.decode(answer.tokens))


def test_each_turn_may_have_a_worker_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    first = observed(tokenizer, worker(tokenizer, tmp_path).answer(request(tokenizer, "go"), {}))
    said = ["go", first, "go", first, "go", first, "stop"]
    for turns in (3, 5):
        asked = request(tokenizer, *said[:turns])
        for _ in range(2):  # the controller was killed before it recorded the first answer
            assert observed(tokenizer, worker(tokenizer, tmp_path).answer(asked, {})) == first
    end = worker(tokenizer, tmp_path).answer(request(tokenizer, *said), {})
    assert isinstance(end, Scored) and end.value == 1.75 and end.metrics["turns"] == 4
    assert end == worker(tokenizer, tmp_path).answer(request(tokenizer, *said), {})


def test_a_trial_restores_before_every_turn(tokenizer: Any) -> None:
    class Broken(Restored):
        def restore(self, row: dict[str, Any], snapshot: bytes) -> None:
            raise KeyError("mine")

    some = worker(tokenizer, None)
    first = observed(tokenizer, some.answer(request(tokenizer, "go"), {}))
    assert observed(tokenizer, some.answer(request(tokenizer, "go", first, "go"), {})) == first
    some = worker(tokenizer, None, Broken)
    first = observed(tokenizer, some.answer(request(tokenizer, "go"), {}))
    failed = some.answer(request(tokenizer, "go", first, "go"), {})
    assert isinstance(failed, Failed) and "raised KeyError: 'mine'" in failed.reason


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: path.unlink(), "turn 1 of trajectory 4 (training) is lost"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "the snapshot after turn 1 is broken"),
        (lambda path: path.write_bytes(b""), "the snapshot after turn 1 is broken"),
    ],
)
def test_without_its_snapshot_an_episode_fails(
    tokenizer: Any, tmp_path: Path, harm: Any, reason: str
) -> None:
    first = observed(tokenizer, worker(tokenizer, tmp_path).answer(request(tokenizer, "go"), {}))
    harm(*files(tmp_path))
    failed = worker(tokenizer, tmp_path).answer(request(tokenizer, "go", first, "go"), {})
    assert isinstance(failed, Failed) and reason in failed.reason


def test_a_snapshot_of_other_tokens_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    worker(tokenizer, tmp_path).answer(request(tokenizer, "go"), {})
    failed = worker(tokenizer, tmp_path).answer(request(tokenizer, "go", "<other>", "go"), {})
    assert isinstance(failed, Failed) and "of another episode" in failed.reason


def test_a_snapshot_is_bytes_and_not_too_many(tokenizer: Any, tmp_path: Path) -> None:
    class Text(Restored):
        def snapshot(self) -> Any:
            return "text"

    failed = worker(tokenizer, tmp_path, Text).answer(request(tokenizer, "go"), {})
    assert isinstance(failed, Failed) and "`snapshot` returned a str: bytes" in failed.reason
    failed = worker(tokenizer, tmp_path, size=0).answer(request(tokenizer, "go"), {})
    assert isinstance(failed, Failed) and "more than `reward.snapshot_bytes` (0)" in failed.reason


def test_what_has_ended_leaves_no_file(tokenizer: Any, tmp_path: Path) -> None:
    some = worker(tokenizer, tmp_path)
    some.answer(request(tokenizer, "go"), {})
    assert len(files(tmp_path)) == 1 and len(some.open) == 1
    some.forget([4])
    some._threads.shutdown()
    assert not files(tmp_path) and len(some.open) == 0


def test_a_killed_run_leaves_only_what_its_trajectories_go_on_from(tokenizer: Any, tmp_path: Path) -> None:
    """A trajectory that has ended, half a file, what evaluations have, and files of an earlier layout go."""
    for stream in "training", stream_of("held-out"):
        worker(tokenizer, tmp_path, stream=stream).answer(request(tokenizer, "go"), {})
    directory = tmp_path / "snapshots"
    kept, half = files(directory.parent)[1], directory / "training" / "4" / "x.part"
    ended = directory / "training" / "5"
    ended.mkdir()
    for path in half, ended / "x.0", directory / "4.1", directory / "6.1.part":
        path.touch()
    sweep(tmp_path, lambda trajectory_id: trajectory_id == 4)
    assert files(tmp_path) == [kept]
    sweep(tmp_path, lambda _: False)
    assert not list(directory.iterdir())


class Numbered(Restored):
    """Its state is of its row."""

    def reset(self, row: dict[str, Any]) -> None:
        self.mine = row["number"]


@pytest.mark.parametrize("streams", [("training", "evaluation-a"), ("evaluation-a", "evaluation-b")])
def test_streams_with_equal_ids_and_tokens_go_on_in_states_of_their_own(
    tokenizer: Any, tmp_path: Path, streams: tuple[str, str]
) -> None:
    """Row, prompt, ids and tokens are equal: only the stream tells whose state a file has."""
    began = {
        stream: observed(
            tokenizer, worker(tokenizer, tmp_path, stream=stream).answer(request(tokenizer, "go"), {})
        )
        for stream in streams
    }
    assert len(set(began.values())) == 2
    for stream, said in began.items():
        other = worker(tokenizer, tmp_path, stream=stream)
        asked = request(tokenizer, "go", said, "go")
        assert observed(tokenizer, other.answer(asked, {})) == said


@pytest.mark.parametrize(
    "other", [{"row": {"number": 2}}, {"prompt": token_array([7])}, {"group_id": 9}], ids=str
)
def test_a_snapshot_of_another_row_or_prompt_is_not_gone_on_from(
    tokenizer: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    row, asked = {"number": 1}, request(tokenizer, "go")
    first = observed(tokenizer, worker(tokenizer, tmp_path, Numbered).answer(asked, row))
    row = other.pop("row", row)
    again = replace(request(tokenizer, "go", first, "go"), **other)
    failed = worker(tokenizer, tmp_path, Numbered).answer(again, row)
    assert isinstance(failed, Failed) and "is lost, or its row is another one now" in failed.reason


def test_rows_of_any_values_have_snapshots(tokenizer: Any, tmp_path: Path) -> None:
    row = {
        "bytes": b"x",
        "set": {"a", "b"},
        "big": 2**70,
        "nan": float("nan"),
        "half": "\ud800",
        "o": object(),
    }
    first = observed(tokenizer, worker(tokenizer, tmp_path).answer(request(tokenizer, "go"), row))
    row["o"] = object()  # as another process has it
    again = worker(tokenizer, tmp_path).answer(request(tokenizer, "go", first, "go"), row)
    assert observed(tokenizer, again) == first


def test_two_workers_write_one_snapshot_at_once(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one writes between the data and the name of the first one."""
    first = observed(tokenizer, worker(tokenizer, tmp_path).answer(request(tokenizer, "go"), {}))
    asked, others = request(tokenizer, "go", first, "go"), [worker(tokenizer, tmp_path)]

    def sync(descriptor: int) -> None:
        if others:
            assert observed(tokenizer, others.pop().answer(asked, {})) == first

    monkeypatch.setattr(os, "fsync", sync)
    assert observed(tokenizer, worker(tokenizer, tmp_path).answer(asked, {})) == first
    assert not others and len(files(tmp_path)) == 2
    again = worker(tokenizer, tmp_path).answer(request(tokenizer, "go", first, "go", first, "go"), {})
    assert observed(tokenizer, again) == first


def test_a_class_that_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "class Half:\n recovery = 'restored'\n def reset(self, row): ...\n def step(self, action): ...\n"
    )
    with pytest.raises(RewardError, match="`recovery` is 'restored': add methods"):
        load_environment(f"{tmp_path}/env.py:Half")
