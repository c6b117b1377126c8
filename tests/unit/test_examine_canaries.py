"""Canary rows: wrong golds, their configuration, and the first warning."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from tests.unit.ledger_records import ready_group, step_of

from millrace.config.load import load
from millrace.core.errors import ConfigError, DataError
from millrace.core.events import Event, Events
from millrace.core.types import EvaluationAttempt, EvaluationRecord, Finish
from millrace.diagnose.examine import CanaryWatch, earning, evidence_of, read_texts
from millrace.episodes.reward_worker import WrongGold
from millrace.ledger.reading import LedgerReader
from millrace.ledger.sqlite import SqliteLedger


class Listed:
    prompt: str = "prompt"

    def __init__(self, golds: list[str], answer: str | None = "answer") -> None:
        self.rows, self.golds, self.answer = len(golds), golds, answer

    def row_id(self, row: int) -> str:
        return f"rows:{row}"

    def columns(self, row: int) -> dict[str, str]:
        return {"prompt": f"p{row}", "answer": self.golds[row], "tests": f"t{self.golds[row]}"}

    def prompt_text(self, row: int, more: str = "", tools: object = ()) -> str:
        return f"p{row}"

    def is_chat(self, row: int) -> bool:
        return False


@pytest.mark.parametrize("answer", ["answer", None])
def test_every_row_has_its_own_prompt_and_another_gold(answer: str | None) -> None:
    honest = Listed([str(i % 3) for i in range(30)], answer)
    task = WrongGold(honest)
    for row in range(30):
        columns = task.columns(row)
        assert columns["prompt"] == task.prompt_text(row) == f"p{row}"
        assert columns["answer"] != honest.golds[row] and columns["tests"] == f"t{columns['answer']}"
        assert columns == task.columns(row)
    assert task.row_id(3) == "canary/rows:3"


def test_a_row_with_a_gold_that_every_row_has_is_broken() -> None:
    with pytest.raises(DataError, match="canary/rows:1: no other row has another gold"):
        WrongGold(Listed(["7", "7"])).prompt_text(1)


FILE = '[model]\npath = "m"\n[task]\nkind = "file"\npath = "a.jsonl"\n[reward]\nkind = "exact"\n'
CANARY = '[[evaluations]]\nname = "c"\ncanary = '


def test_wrong_golds_need_no_task_and_impossible_rows_do(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILE + CANARY + '"wrong-gold"\n')
    config = load(path)
    assert config.of_evaluation(config.evaluations[0]).task == config.task
    assert evidence_of(config).canaries == {"c": "wrong-gold"}
    path.write_text(FILE + CANARY + '"rows"\n')
    with pytest.raises(ConfigError, match="needs a `task` of its own"):
        load(path)
    played = FILE.replace('"exact"', '"environment"\npath = "a.py:A"')
    path.write_text(played + CANARY + '"wrong-gold"\n')
    with pytest.raises(ConfigError, match='Set `canary` to "rows"'):
        load(path)
    path.write_text(played + CANARY + '"wrong-gold"\nreward = { kind = "exact" }\n')
    assert load(path).evaluations[0].canary == "wrong-gold"
    path.write_text(FILE + CANARY + '"wrong-gold"\npatience = 3\n')
    with pytest.raises(ConfigError, match="a canary must earn nothing"):
        load(path)


def decode(tokens: object) -> str:
    return "".join(map(chr, tokens))  # type: ignore[call-overload]


def attempt(row: int, attempt: int, reward: float | None, text: str, observed: str = "") -> EvaluationAttempt:
    """`observed`: what an environment answered."""
    tokens = array("i", [*map(ord, text), *(-1 - ord(one) for one in observed)])
    return EvaluationAttempt(row, f"traps:{row}", attempt, tokens, Finish.STOP, reward)


def test_the_first_reward_of_a_canary_is_warned_of_once_with_its_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILE + CANARY + '"rows"\ntask = { kind = "file", path = "traps.jsonl" }\n')
    ledger, event_list = SqliteLedger(tmp_path / "ledger.sqlite", run={}), list[Event]()
    events = Events(lambda: 0.0, lambda: 0.0)
    events.subscribe(event_list.append)
    watch = CanaryWatch(events, tmp_path / "ledger.sqlite", decode, load(path).evaluations)
    for version, reward in enumerate((0.0, 0.5, 1.0)):
        if version:
            group = ready_group(version, version - 1)
            ledger.admit([group])
            ledger.commit_step(step_of(version, group))
        rows = [attempt(0, 0, 0.0, "no"), attempt(0, 1, None, "?"), attempt(1, 0, reward, "trust me", "no")]
        ledger.evaluated(EvaluationRecord("c", version, {}), rows)
        watch(Event("evaluated", 0.0, 0.0, {"name": "c", "version": version}))
    (warned,) = [event.fields for event in event_list]
    assert warned["source"] == "canary" and "at version 1, 1 completions" in warned["reason"]
    assert "traps:1: reward 0.5 for 'trust me'" in warned["reason"]
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        assert [text.completion for text in earning(reader, "c", 2, decode)] == ["trust me"]
        read_texts(evidence := evidence_of(load(path)), reader, decode)
        assert {text.row_id for text in evidence.late_texts}
    ledger.close()
