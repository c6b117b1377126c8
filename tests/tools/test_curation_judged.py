"""The gold check, difficulties, attempts that are kept, evaluation texts and the files of a curation."""

from __future__ import annotations

import datetime
import json
from array import array
from pathlib import Path

import pytest

from millrace.core.errors import ConfigError, DataError, LedgerError
from millrace.core.types import EvaluationAttempt, Finish
from millrace.estimates.interval import of_attempts
from millrace.tasks.order import row_of
from millrace.tasks.rows import open_rows
from millrace_curation.candidate import CandidateRow, Dropped, Reason
from millrace_curation.curate import Curation, CurationOptions
from millrace_curation.measure import AttemptsByRow, attempt_ledger, groups_by_row, pass_rate
from millrace_curation.output import summarized, write_rows
from millrace_curation.row_measures import (
    EMPTY,
    GOLD,
    KINDS,
    OTHER,
    PROMPT,
    GoldScore,
    PassRate,
    attempts_at,
    check_template,
    judge_difficulty,
    judge_gold,
)
from millrace_curation.task_rows import read_evaluation_texts
from millrace_ui.curated import curated, read_page

ABOUT = {"rows": "1", "model": "2"}


def row(index: int, answer: str | None = "7", text: str = "3 + 4 =") -> CandidateRow:
    return CandidateRow(
        index, f"rows:{index}", {"prompt": text, "answer": answer}, text, text, [1, 2], answer
    )


def gold_scores(**rewards: float | None) -> dict[str, GoldScore]:
    names = {"gold": GOLD, "empty": EMPTY, "prompt": PROMPT, "one": OTHER[0], "two": OTHER[1]}
    full = {"gold": 1.0, "empty": 0.0, "prompt": 0.0, "one": 0.0, "two": 0.0} | rewards
    return {names[name]: GoldScore(value, "it raised", "seen") for name, value in full.items()}


def attempt(index: int, number: int, reward: float | None, finish: Finish = Finish.STOP) -> EvaluationAttempt:
    return EvaluationAttempt(index, f"rows:{index}", number, array("i", [1]), finish, reward)


def test_wrong_answers_are_those_of_rows_with_another_answer() -> None:
    tried = attempts_at([row(0, "7"), row(1, " 7 "), row(2, "8"), row(3, "9")], "<a>{answer}</a>")
    assert all(len(texts) == len(KINDS) for texts in tried)
    assert tried[0] == ["<a>7</a>", "", "3 + 4 =", "<a>8</a>", "<a>9</a>"]
    assert tried[1][3:] == ["<a>8</a>", "<a>9</a>"]
    assert attempts_at([row(0, "7"), row(1, "7")], "{answer}")[0][3:] == [None, None]


@pytest.mark.parametrize("template", ["42", "{gold}", "{answer", "no answer"])
def test_a_template_without_its_answer_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="--gold-template"):
        check_template(template)


def test_a_row_passes_whose_answer_alone_has_the_full_score() -> None:
    assert judge_gold(gold_scores(), 1.0) is None
    assert judge_gold(gold_scores(one=1.0), 1.0) is None  # another notation of the same number
    assert judge_gold(gold_scores(empty=None), 1.0) is None  # a reward that raises accepts nothing


@pytest.mark.parametrize(
    ("rewards", "reason", "detail"),
    [
        ({"gold": 0.5}, Reason.GOLD_REFUSED, "it gets 0.5, less than 1: 'seen'"),
        ({"gold": None}, Reason.GOLD_REFUSED, "it has no reward: it raised"),
        (
            {"one": 1.0, "two": 1.0},
            Reason.WRONG_ACCEPTED,
            "the answer of another row has the full score: 'seen'",
        ),
        ({"empty": 1.0}, Reason.WRONG_ACCEPTED, "an empty text has the full score"),
        ({"prompt": 1.0}, Reason.WRONG_ACCEPTED, "the prompt has the full score"),
    ],
)
def test_what_is_wrong_with_a_reward_is_told(rewards: dict[str, float], reason: Reason, detail: str) -> None:
    assert judge_gold(gold_scores(**rewards), 1.0) == Dropped(reason, detail)


def test_bands_follow_the_pass_rate_and_failed_rewards_are_in_no_rate() -> None:
    bands = {n: PassRate(n, 8, 0, 0, 0.0).band for n in (0, 1, 2, 3, 5, 6, 8)}
    assert list(bands.values()) == ["too hard", "hard", "hard", "medium", "medium", "easy", "too easy"]
    rate = pass_rate([attempt(0, 1, 1.0), attempt(0, 2, None), attempt(0, 3, 0.5, Finish.LENGTH)], 1.0)
    assert rate == PassRate(correct=1, scored=2, unscored=1, truncated=1, reward_mean=0.75)
    assert rate.rate == 0.5


def test_rows_without_a_signal_are_dropped_unless_they_are_to_be_kept() -> None:
    def judged(correct: int, scored: int, **keep: bool) -> Reason | None:
        rate = PassRate(correct, scored, 0, 0, None)
        dropped = judge_difficulty(rate, keep_hard=keep.get("hard", False), keep_easy=keep.get("easy", False))
        return dropped and dropped.reason

    assert [judged(n, 4) for n in (0, 1, 4)] == [Reason.TOO_HARD, None, Reason.TOO_EASY]
    assert judged(0, 4, hard=True) is judged(4, 4, easy=True) is None
    assert judged(0, 0, hard=True) is Reason.UNSCORED


def test_the_interval_of_a_pass_rate_is_wilsons() -> None:
    assert of_attempts(0, 0) == (0.0, 1.0)
    assert of_attempts(1, 10) == pytest.approx((0.01788, 0.40415), abs=1e-5)  # Newcombe 1998, method 3
    assert of_attempts(0, 8) == pytest.approx((0.0, 0.32441), abs=1e-5)
    assert of_attempts(8, 8)[1] == 1.0


def test_every_row_has_the_group_that_draws_it() -> None:
    groups = groups_by_row(37, seed=5)
    assert sorted(groups) == list(range(37))
    assert all(row_of(group, 37, 5) == index for index, group in groups.items())


def test_attempts_are_there_again_and_a_row_is_recorded_once(tmp_path: Path) -> None:
    path = tmp_path / "attempts.sqlite"
    with attempt_ledger(path, ABOUT) as ledger:
        store = AttemptsByRow(path, ledger, "samples-2")
        store.keep([attempt(3, 1, 1.0), attempt(3, 2, None), attempt(5, 1, 0.0), attempt(5, 2, 0.0)])
        AttemptsByRow(path, ledger, "gold").keep([attempt(3, 0, 1.0)])
    with attempt_ledger(path, ABOUT) as ledger:
        store = AttemptsByRow(path, ledger, "samples-2")
        assert {index: [one.reward for one in of] for index, of in store.by_row.items()} == {
            3: [1.0, None],
            5: [0.0, 0.0],
        }
        assert list(AttemptsByRow(path, ledger, "gold").by_row) == [3]
        assert not AttemptsByRow(path, ledger, "samples-4").by_row
        with pytest.raises(LedgerError, match="cannot be recorded"):
            ledger.evaluated(ledger.evaluations()[0], [])


def test_attempts_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    with attempt_ledger(tmp_path / "a", ABOUT):
        pass
    with pytest.raises(DataError, match=r"made otherwise:\n  model: 2 -> 3\n"):
        with attempt_ledger(tmp_path / "a", ABOUT | {"model": "3"}):
            pass


def test_an_evaluation_set_has_a_column_of_its_own_and_names_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    texts = "q", messages, json.dumps(messages)
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    assert [one.text for one in read_evaluation_texts(f"{path}:question", "prompt")] == ["q", *["a\nb"] * 2]
    with pytest.raises(DataError, match=r"test.jsonl:1 has nothing as `prompt`, only \['question'\]"):
        list(read_evaluation_texts(str(path), "prompt"))
    with pytest.raises(DataError, match="takes FILE or FILE:COLUMN"):
        list(read_evaluation_texts("nowhere.jsonl", "prompt"))


def a_curation() -> Curation:
    rows = [row(index, text=f"text {index}") for index in range(4)]
    rates = {1: PassRate(1, 4, 0, 0, 0.25), 2: PassRate(0, 4, 0, 2, 0.0), 3: PassRate(0, 0, 4, 0, None)}
    drops = {
        0: Dropped(Reason.DUPLICATE, "of <b>"),
        2: Dropped(Reason.TOO_HARD, "0 of 4"),
        3: Dropped(Reason.UNSCORED, "none"),
    }
    return Curation(rows, drops, {1: {GOLD: GoldScore(1.0)}}, rates)


def test_every_row_is_in_the_table_and_the_kept_rows_are_a_tasks(tmp_path: Path) -> None:
    curation = a_curation()
    curation.rows[1] = CandidateRow(
        1, "rows:1", {"prompt": "p", "when": datetime.date(2026, 1, 2)}, "p", "p", [1]
    )
    write_rows(curation, tmp_path)
    table = open_rows(str(tmp_path / "rows.parquet"))
    assert [table[index]["kept"] for index in range(4)] == [False, True, False, False]
    assert [table[index]["reason"] for index in range(4)] == ["duplicate", "", "too hard", "unscored"]
    assert table[1]["pass_rate"] == 0.25 and table[1]["gold_reward"] == 1.0 and table[0]["pass_rate"] is None
    kept = open_rows(str(tmp_path / "kept.jsonl"))
    assert [kept[index] for index in range(len(kept))] == [{"prompt": "p", "when": "2026-01-02"}]


def test_a_value_that_json_lacks_is_named_with_its_row_and_column(tmp_path: Path) -> None:
    curation = Curation([CandidateRow(0, "rows:0", {"prompt": "p", "image": b"png"}, "p", "p", [1])])
    with pytest.raises(DataError, match="rows:0: column 'image' cannot be kept as JSON"):
        write_rows(curation, tmp_path)


def test_the_summary_counts_and_its_page_escapes(tmp_path: Path) -> None:
    summary = summarized(a_curation(), CurationOptions(samples=4), {"task": "rows", "model": "m"})
    assert summary["num_rows"] == 4 and summary["num_kept"] == 1
    assert summary["reasons"] == {"duplicate": 1, "unscored": 1, "too hard": 1}
    rates = summary["pass_rates"]
    assert rates["histogram"] == [1, 1, 0, 0, 0] and rates["unscored"] == 4 and rates["num_rows"] == 2
    assert rates["mean"] == 0.125
    html = curated(json.loads(json.dumps(summary))).html
    assert "of &lt;b&gt;" in html and "of <b>" not in html
    with pytest.raises(DataError, match="no summary of a curation"):
        (tmp_path / "curation.json").write_text("[]")
        read_page(tmp_path)
