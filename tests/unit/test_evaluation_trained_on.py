"""An evaluation leaves out what the run of its model was trained on."""

from pathlib import Path

import msgspec
import pytest
from ledger_records import ready_group, step_of

from millrace.checks.first_try import TaskFacts, repeated
from millrace.core import model_version
from millrace.core.completion.columns import token_array
from millrace.core.errors import DataError
from millrace.core.types import BadPrompt, Prompt
from millrace.evaluation import evaluated_runs, scoring
from millrace.evaluation.evaluated_runs import TrainedOn
from millrace.ledger.sqlite import SqliteLedger
from millrace.run_directory.run_directory import Parent, RunDirectory

pytestmark = pytest.mark.usefixtures("warm")


def run_of(path: Path, *trained: int, admitted: int = 6) -> RunDirectory:
    """A run whose step to version v was trained on the v-th of the groups `trained`."""
    run = RunDirectory(path)
    run.ledger.parent.mkdir(parents=True)
    ledger = SqliteLedger(run.ledger, run={})
    groups = {group_id: ready_group(group_id) for group_id in range(admitted)}
    for group in groups.values():
        group.row_digest = f"row {group.group_id}"
    ledger.admit(list(groups.values()))
    for version, group_id in enumerate(trained, 1):
        ledger.commit_step(step_of(version, groups[group_id]))
    ledger.close()
    return run


def prompt(number: int, text: str = "", digest: str = "") -> Prompt:
    return Prompt(number, f"row {number}", token_array([1]), text or f"prompt {number}", {}, digest)


def keys(run: RunDirectory, version: int, monkeypatch, kind: str = "exact") -> frozenset[str]:
    config = type("Config", (), {"reward": type("Reward", (), {"kind": kind})})
    monkeypatch.setattr(evaluated_runs, "origin", lambda path: (run, version))
    known = evaluated_runs.trained_on(run.path, config)
    assert known is not None
    return known.keys


def test_prompts_of_trained_groups_are_known_and_no_others(tmp_path, monkeypatch):
    run = run_of(tmp_path / "run", 0, 3, 1)
    assert keys(run, 3, monkeypatch) == {"prompt 0", "prompt 3", "prompt 1"}
    assert keys(run, 2, monkeypatch) == {"prompt 0", "prompt 3"}  # of an earlier checkpoint
    assert keys(run, 2, monkeypatch, "environment") == {"row 0", "row 3"}


def test_a_run_that_began_from_another_knows_the_prompts_of_both(tmp_path, monkeypatch):
    parent, run = run_of(tmp_path / "parent", 5, 4), run_of(tmp_path / "run", 0)
    told = Parent("parent", "parent", str(parent.path), 1, moments=False)
    run.parent.write_bytes(msgspec.json.encode(told))
    assert keys(run, 1, monkeypatch) == {"prompt 0", "prompt 5"}
    gone = Parent("gone", "gone", str(tmp_path / "gone"), 1, moments=False)
    run.parent.write_bytes(msgspec.json.encode(gone))
    assert keys(run, 1, monkeypatch) == {"prompt 0"}


def test_a_model_of_no_run_was_trained_on_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_version.read(tmp_path) < 0 and evaluated_runs.trained_on(tmp_path, None) is None


@pytest.fixture
def served(monkeypatch):
    """A worker with these prompts as its rows, in place of a process."""

    def serve(*rows):
        class Worker:
            async def call(self, method, ids, timeout_s):
                return [rows[i % len(rows)] for i in ids]

        async def start(*_):
            return Worker()

        monkeypatch.setattr(scoring, "start_worker", start)

    return serve


CONFIG = type("Config", (), {"supervision": type("Supervision", (), {"spawn_timeout_s": 60.0})})


def test_others_take_the_place_of_prompts_that_are_left_out(served):
    served(*map(prompt, range(6)))
    known = TrainedOn("RUN", frozenset({"prompt 0", "prompt 2"}), by_row=False)
    chosen = scoring.prompts(CONFIG, 3, known.leaves_out)
    assert [one.text for one in chosen] == ["prompt 1", "prompt 3", "prompt 4"]
    assert str(known) == "2 prompts were left out, because RUN was trained on them"


def test_other_rows_with_the_same_prompt_are_left_out_too(served):
    served(prompt(0), prompt(7, text="prompt 0"), prompt(1))
    known = TrainedOn("RUN", frozenset({"prompt 0"}), by_row=False)
    assert [one.text for one in scoring.prompts(CONFIG, 3, known.leaves_out)] == ["prompt 1"]
    assert known.left_out == {"row 0", "row 7"}


def test_episodes_are_told_apart_by_their_rows(served):
    served(prompt(0, "Play.", "a"), prompt(1, "Play.", "b"))
    known = TrainedOn("RUN", frozenset({"a"}), by_row=True)
    assert [one.row_digest for one in scoring.prompts(CONFIG, 3, known.leaves_out)] == ["b"]


def test_an_evaluation_without_a_prompt_left_says_what_to_do(served):
    served(prompt(0), BadPrompt(1, "row 1", "broken"))
    known = TrainedOn("RUN", frozenset({"prompt 0"}), by_row=False)
    with pytest.raises(DataError, match=r"(?s)trained on each of the 1 prompts .*--with-trained"):
        known.refuse_if_none(scoring.prompts(CONFIG, 3, known.leaves_out))


def test_held_out_prompts_among_those_of_training_are_counted():
    def facts(*keys):
        return TaskFacts(prompt(0), 9, 1, 0, "", keys)

    [said] = repeated("`evaluations` (few)", facts("a", "b", "c"), facts("c", "a", "x", "y"))
    assert said.startswith("`evaluations` (few): 2 of its first 3 prompts are among the first 4 prompts")
    assert list(repeated("", facts("a"), facts("b"))) == []
