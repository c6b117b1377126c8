"""An episode whose worker is lost goes on from its last snapshot, or fails with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_turns_episodes import Counter, request, tokenizer

from millrace.core.errors import RewardError
from millrace.core.types import Failed, Observed, Scored
from millrace.environments.turns.bridge import PlainBridge
from millrace.environments.turns.budgets import Budgets
from millrace.environments.turns.environment import Done, Observation
from millrace.environments.turns.episodes import Episodes
from millrace.environments.turns.forms import load_environment
from millrace.environments.turns.snapshots import Snapshots, sweep

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


def worker(tokenizer: Any, run_dir: Path | None, kind: Any = Restored, size: int = 100) -> Episodes:
    return Episodes(
        kind,
        name="env",
        file=None,
        bridge=PlainBridge(tokenizer),
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        budgets=Budgets(8),
        snapshots=Snapshots(run_dir, size),
        timeout_s=60.0,
        trial=run_dir is None,
    )


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
        (lambda path: path.unlink(), "the snapshot after turn 1 is lost"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "the snapshot after turn 1 is broken"),
        (lambda path: path.write_bytes(b""), "the snapshot after turn 1 is broken"),
    ],
)
def test_without_its_snapshot_an_episode_fails(
    tokenizer: Any, tmp_path: Path, harm: Any, reason: str
) -> None:
    first = observed(tokenizer, worker(tokenizer, tmp_path).answer(request(tokenizer, "go"), {}))
    harm(tmp_path / "snapshots" / "4.1")
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


def test_the_files_of_an_ended_trajectory_go(tokenizer: Any, tmp_path: Path) -> None:
    some = worker(tokenizer, tmp_path)
    some.answer(request(tokenizer, "go"), {})
    files = tmp_path / "snapshots"
    (files / "5.0").touch()
    (files / "6.1.part").touch()
    assert sorted(path.name for path in files.iterdir()) == ["4.1", "5.0", "6.1.part"]
    sweep(tmp_path, lambda trajectory_id: trajectory_id == 5)
    assert [path.name for path in files.iterdir()] == ["4.1"]
    closed = list[int]()
    some._live[4].close = lambda: closed.append(4)  # type: ignore[method-assign]
    some.forget([4])
    some._threads.shutdown()
    assert not list(files.iterdir()) and closed == [4] and not some._live


def test_a_class_that_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "class Half:\n recovery = 'restored'\n def reset(self, row): ...\n def step(self, action): ...\n"
    )
    with pytest.raises(RewardError, match="`recovery` is 'restored': add methods"):
        load_environment(f"{tmp_path}/env.py:Half")
