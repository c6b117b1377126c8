"""Rows that are broken, too long, repeated or contaminated, as filters see them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace_curation import filters
from millrace_curation.candidate import CandidateRow, Reason
from millrace_curation.filters import (
    PERMUTATIONS,
    EvaluationText,
    contaminated,
    near_earlier,
    rows_per_band,
    signatures,
    similarity,
)
from millrace_curation.words import figures_of, normalized, runs_of, words_of

STORY = (
    "A baker in the old town sells 48 loaves of bread every morning and 24 rolls after lunch. "
    "How many pieces does the baker sell in a week if the shop is closed on Sunday"
)
PLANTS = (
    "Green plants take up carbon dioxide and water and give back oxygen as long as the sun shines on them"
)
RANDOM_WORDS = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400)]


def rows(*texts: str, answers: tuple[str, ...] = ()) -> list[CandidateRow]:
    known = answers or (None,) * len(texts)
    return [
        CandidateRow(i, f"rows:{i}", {}, text, text, list(range(len(text.split()))), answer)
        for i, (text, answer) in enumerate(zip(texts, known, strict=True))
    ]


def some_text(seed: int, num: int = 40) -> str:
    return " ".join(random.Random(seed).choices(RANDOM_WORDS, k=num))


def reasons(drops: filters.Drops) -> dict[int, Reason]:
    return {index: drop.reason for index, drop in drops.items()}


def test_words_have_no_punctuation_and_numbers_no_commas_of_thousands() -> None:
    assert words_of("It's 1,250 $x$ + 3.5, (Yes!)") == ["it", "s", "1250", "x", "+", "3.5", "yes"]
    assert words_of("日本 go") == ["日", "本", "go"]
    assert figures_of(words_of("3 * 4 is b")) == ("3", "*", "4")
    assert normalized("  Two\n Lines ") == "two lines"


def test_runs_of_words_depend_on_their_order_and_a_short_text_is_one_run() -> None:
    a, b = runs_of(["a", "b", "a"], 2)
    assert a != b
    assert len(runs_of(["a"], 2)) == 1
    assert len(runs_of([], 2)) == 0


def test_a_signature_estimates_the_similarity_of_sets() -> None:
    draw = np.random.default_rng(0)
    common, one, two = (draw.integers(0, 2**63, 300, dtype=np.uint64) for _ in range(3))
    a, b = np.sort(np.concatenate([common, one])), np.sort(np.concatenate([common, two]))
    assert similarity(a, b) == pytest.approx(1 / 3)
    marks = signatures([a, b])
    assert float(np.mean(marks[0] == marks[1])) == pytest.approx(1 / 3, abs=0.13)  # three standard errors


def test_bands_miss_hardly_any_pair_at_the_threshold() -> None:
    for threshold in (0.5, 0.8, 0.95):
        r = rows_per_band(threshold)
        assert (1 - threshold**r) ** (PERMUTATIONS // r) <= 1e-3
    assert rows_per_band(0.5) < rows_per_band(0.8) < rows_per_band(0.95)


def test_of_similar_sets_the_first_stays_and_no_chain_removes_what_is_not_near_it() -> None:
    first, second, third = (np.arange(start, start + 100, dtype=np.uint64) for start in (0, 8, 16))
    near = near_earlier([first, second, third], [0, 0, 0], 0.8)
    assert list(near) == [1]  # the third is near the second only, which is not there any more
    assert near[1] == (0, pytest.approx(92 / 108))
    assert near_earlier([first, first], [0, 1], 0.8) == {}


def test_broken_and_empty_rows_are_told_apart() -> None:
    good, blank, unanswered = rows("a text", "  ", "a text", answers=("1", "1", " "))
    bad = CandidateRow(3, "rows:3", fault="no JSON")
    assert filters.broken([good, bad])[3].detail == "no JSON"
    empty = filters.empty([good, blank, unanswered])
    assert {index: drop.detail for index, drop in empty.items()} == {1: "the prompt", 2: "the answer"}


def test_lengths_are_inclusive() -> None:
    drops = filters.lengths(rows("a", "a b", "a b c", "a b c d"), 2, 3)
    assert reasons(drops) == {0: Reason.TOO_SHORT, 3: Reason.TOO_LONG}
    assert drops[3].detail == "4 tokens, at most 3"


def test_case_width_and_space_make_no_other_row_and_another_answer_is_told() -> None:
    drops = filters.duplicates(
        rows("Two  words", "two words", "ＴＷＯ words", "three", answers=("1", "1", "2", "1"))
    )
    assert reasons(drops) == {1: Reason.DUPLICATE, 2: Reason.DUPLICATE}
    assert drops[1].detail == "of rows:0"
    assert "another answer: '2', not '1'" in drops[2].detail


def test_a_few_other_words_make_a_near_duplicate_and_other_numbers_another_row() -> None:
    near = STORY.replace("baker in the old town", "baker in the small town").replace(". How", "\nhow")
    other = STORY.replace("48", "52")
    drops = filters.near_duplicates(rows(STORY, near, other, PLANTS), 0.8)
    assert reasons(drops) == {1: Reason.NEAR_DUPLICATE}
    assert drops[1].detail.endswith("of rows:0")
    assert filters.near_duplicates(rows(STORY, near), 1.0) == {}


def test_a_frame_around_every_row_makes_no_near_duplicates() -> None:
    frame = f"{PLANTS}. Think step by step and put the final answer into a box at the very end of the text: "
    framed = [frame + some_text(seed, 8) for seed in range(60)]
    assert filters.near_duplicates(rows(*framed), 0.8) == {}
    assert reasons(filters.near_duplicates(rows(*framed, f"{framed[7]}."), 0.8)) == {
        60: Reason.NEAR_DUPLICATE
    }


def test_a_row_with_a_run_of_words_of_an_evaluation_is_contaminated_and_the_words_are_shown() -> None:
    evaluations = [EvaluationText("test:4", f"{STORY}?")]
    inside = f"Here is a riddle: {STORY.upper()} - answer it"
    part = "Yesterday " + STORY[: len(STORY) * 2 // 3]
    less = "Yesterday a baker in the old town sells 48 loaves of bread, and that was all"
    drops = contaminated(rows(PLANTS, inside, part, less), evaluations, 8)
    assert reasons(drops) == {1: Reason.CONTAMINATED, 2: Reason.CONTAMINATED}
    assert drops[1].detail.startswith("100% of test:4: 'a baker in the old town sells 48 loaves")
    assert drops[2].detail.startswith("63% of test:4: 'a baker")
    gapped = STORY.replace("morning", "day").replace("pieces", "buns")
    assert 0 in contaminated(rows(gapped), evaluations, 8)
    assert 0 not in contaminated(rows(gapped), evaluations, 20)


def test_a_short_evaluation_text_must_be_in_a_row_whole_and_a_very_short_one_must_be_the_row() -> None:
    evaluations = [EvaluationText("a", "What is the capital of France?"), EvaluationText("b", "stone.")]
    texts = (
        "Tell me: what is the capital of france",
        "What is the capital of Spain",
        "Stone",
        "a stone wall",
    )
    assert list(contaminated(rows(*texts), evaluations, 8)) == [2, 0]


def test_a_frame_that_the_evaluation_shares_with_every_row_is_no_contamination() -> None:
    frame = "Think step by step and put the final answer into a box at the end. "
    texts = [frame + some_text(seed) for seed in range(60)]
    evaluations = [EvaluationText("test:1", frame + some_text(99)), EvaluationText("test:2", some_text(7))]
    assert list(contaminated(rows(*texts), evaluations, 8)) == [7]
