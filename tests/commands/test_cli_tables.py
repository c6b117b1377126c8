"""What commands print as tables reads well in a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from millrace.api.plain_records import RunComparison
from millrace.cli import try_task
from millrace_sim import simulate_command
from millrace_ui.commands import show


def lines(*shown: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(*shown, sep="\n")
    output = console.file
    assert isinstance(output, io.StringIO)
    said = output.getvalue().splitlines()
    assert max(map(len, said)) <= 80 and "…" not in output.getvalue()
    return [line.rstrip() for line in said]


def test_two_runs_are_one_table_with_a_column_for_each_run() -> None:
    change = [{"key": f"schedule.key_{i}", "old": i, "new": None} for i in range(12)]
    comparison = RunComparison(
        runs=["a", "b"],
        figures={f"figure {i}": [1.5 * i, 2.5 * i] for i in range(9)},
        reward={"a": [0.1, 0.2], "b": [0.3]},
        differences={"b": change},
    )
    said = lines(comparison)
    assert len([line for line in said if line.split() == ["1", "2"]]) == 1
    assert len(said) < 9 + 12 + 8


def test_a_reason_of_a_failed_reward_is_said_once_and_not_in_a_column() -> None:
    reason = "reward.py:reward raised ValueError: " + "there is no answer in it " * 8
    one = {"row": "a-file-of-rows.jsonl:117", "kind": "garbage", "completion": "lorem ipsum " * 9}
    failed = one | {"outcome": "failed", "value": None, "reason": reason, "seconds": 0.001}
    scored = one | {"outcome": "scored", "value": 0.25, "reason": "", "seconds": 0.002}
    assert len(lines(try_task._table([failed, scored, failed]))) == 4
    assert list(try_task._reasons([failed, scored, failed])) == [f"2 of 3 calls: {reason}"]


def test_the_metrics_of_a_reward_are_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    one = {"row": "train.jsonl:366", "prompt": "ab>", "prompt_tokens": 3, "outcome": "scored", "reason": ""}
    one |= {"completion": "lorem ipsum 42 )}]", "seconds": 0.001}
    right = one | {"kind": "reference", "value": 1.0, "metrics": {"letters": 1.0, "whole": 1.0}}
    wrong = one | {"kind": "garbage", "value": 0.25, "metrics": {"letters": 0.5}}
    try_task._print([right, wrong], [])
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["row", "completion", "letters", "whole"] in said
    assert ["train.jsonl:366", "garbage", "0.5", "-"] in said
    try_task._print([right | {"metrics": {}}], [])
    assert "Metrics" not in capsys.readouterr().out


def test_evaluations_have_few_columns_and_a_skipped_one_a_line() -> None:
    done = {
        "name": "held-out-words", "version": 1200, "greedy": 0.94511, "pass": 0.97, "majority": 0.95,
        "greedy_low": 0.9, "greedy_high": 0.97, "samples": 4, "reward": 0.8765, "took_s": 12.5,
        "best": "best", "skipped": "",
    }  # fmt: skip
    reason = "the evaluation of version 1100 was not done when version 1200 was due"
    said = lines(show._evaluations([done, done | {"version": 1201, "best": ""}, done | {"skipped": reason}]))
    head = next(line for line in said if "greedy" in line)
    assert head.split() == [
        "evaluation",
        "version",
        "greedy",
        "95",
        "%",
        "interval",
        "pass",
        "majority",
        "reward",
    ]
    assert any("0.900 to 0.970" in line for line in said) and any("was skipped: the" in line for line in said)


def test_a_simulated_figure_is_on_the_line_of_its_interval() -> None:
    row = ("synchronous", "213.8 ± 9.5", "30,045 ± 21,379", "28%", "59%", "13%", "0.00", "10", "0.87")
    assert any(
        "213.8 ± 9.5 30,045 ± 21,379" in line
        for line in lines(simulate_command._table([simulate_command.HEADING, row]))
    )
