"""A few trajectories to read: chosen by the ledger, shown harmless."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from ledger_records import complete, grow, lease, make_group

from millrace.core.errors import LedgerError
from millrace.core.types import State
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import Choice
from millrace.observe.shown_samples import clipped, render_sample
from millrace.observe.terminal import Terminal

SAMPLE = {
    "trajectory_id": 7,
    "state": "trained",
    "reason": "",
    "finish": "stop",
    "reward": 0.5,
    "num_tokens": 3,
    "trained_version": 4,
    "versions": [2, 3],
    "prompt": "1+1=",
    "completion": "2",
}


@pytest.fixture
def reader(tmp_path: Path) -> LedgerReader:
    """Six trajectories: rewards 0, 1, 0, 1; one failed; one still generated."""
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", run={})
    groups = [make_group(group_id) for group_id in range(3)]
    for number, member in enumerate(member for group in groups for member in group.members):
        lease(member)
        grow(member, 2, version=number)
        if number < 4:
            complete(member, float(number % 2))
    failed = groups[2].members[0]
    complete(failed)
    failed.state, failed.reward, failed.reason = State.FAILED, None, "reward: no latin"
    ledger.admit(groups)
    ledger.flush()
    ledger.close()
    return LedgerReader(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        (Choice.NEWEST, [4, 3, 2]),
        (Choice.BEST, [3, 1, 2]),
        (Choice.WORST, [2, 0, 3]),
        (Choice.FAILED, [4]),
    ],
)
def test_samples_are_chosen_by_reward_or_age_the_newest_of_equals_first(
    reader: LedgerReader, choice: Choice, ids: list[int]
) -> None:
    with reader:
        assert [trajectory.trajectory_id for _, trajectory in reader.samples(choice, 3)] == ids


def test_a_sample_has_its_prompt_and_its_tokens(reader: LedgerReader) -> None:
    with reader:
        (sample,) = reader.samples(Choice.FAILED, 5)
    assert (sample.prompt.text, sample.trajectory.reason) == ("prompt 2", "reward: no latin")
    assert sample.trajectory.columns.versions() == [4, 4]


def shown(width: int = 80, **changes: object) -> str:
    console = Terminal(file=io.StringIO(), width=width)
    console.print(render_sample(SAMPLE | changes))
    return console.file.getvalue()


def test_a_sample_tells_its_outcome_in_one_line() -> None:
    assert "trajectory 7, reward 0.5, trained in step 4, 3 tokens, versions 2 to 3" in shown()
    failed = shown(reward=None, state="failed", trained_version=None, reason="no latin", finish="length")
    assert "trajectory 7, no reward, failed, no latin, 3 tokens, cut at the longest" in failed


def test_an_escape_sequence_in_a_completion_is_shown_and_not_obeyed() -> None:
    text = shown(completion="\x1b[2Jhidden\u202e")
    assert "\u241b[2Jhidden\ufffd" in text and "\x1b" not in text
    assert set(map(len, text.splitlines()[2:])) == {80}


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_of_a_sample_is_wider_than_the_terminal(width: int) -> None:
    text = shown(width, prompt="word " * 100, completion="x" * 5000, reason="because " * 20)
    assert max(map(len, text.splitlines())) <= width


def test_a_long_text_keeps_both_ends() -> None:
    assert clipped("short") == "short"
    assert clipped("a" * 50 + "b" * 51, 10) == "aaaaa\n[... 91 characters ...]\nbbbbb"


def test_a_sample_without_a_tokenizer_says_why_there_is_no_text() -> None:
    assert "tokenizer is not at" in shown(completion=None)


def test_a_question_ends_when_who_asked_will_not_wait(
    reader: LedgerReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.ledger.reading._STOP_CHECKED_EVERY", 1)
    impatient = LedgerReader(tmp_path / "ledger.sqlite", check=False, stop=lambda: True)
    with pytest.raises(LedgerError, match="took longer than who asked would wait"):
        impatient.samples(Choice.BEST, 1)


def test_samples_go_on_before_the_last_one(reader: LedgerReader) -> None:
    first = [one.trajectory.trajectory_id for one in reader.samples_before(None, 3)]
    rest = [one.trajectory.trajectory_id for one in reader.samples_before(first[-1], 10)]
    assert first + rest == sorted(first + rest, reverse=True)
    assert len(first) == 3
    assert rest
