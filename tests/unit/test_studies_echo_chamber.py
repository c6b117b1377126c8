"""The study of formats: what it recognises and counts, and that a kept result is not made again."""

from __future__ import annotations

import math

import pytest
from echo_chamber import write_plots
from echo_formats import FORMATS, Tally, answer, demonstrations, format_of, problems, prompt, text_of, tilted
from echo_tables import figures, tables, verdict
from study import Results, write_tables

TERMS = (3, 5, 7, 2)


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_has_its_format_and_no_other(form):
    assert format_of(answer(TERMS, form)) == form
    assert answer(TERMS, form).endswith("so 17")


@pytest.mark.parametrize("text", ["", "so", "so 1 so 1", "3 and 5 make so 17", "x = 3 print x > so 3"])
def test_anything_else_has_no_format(text):
    assert format_of(text) == "other"


def test_wrong_numbers_do_not_change_the_format():
    assert format_of("3 and 5 make 9 then 9 and 1 make 2 so 30") == "words"


def test_held_out_problems_are_never_shown():
    held_out, rest = problems(64)
    assert not set(held_out) & set(rest) and len(held_out) + len(rest) == 9**4
    pairs = demonstrations(rest, {"direct": 0.25, "words": 0.75}, num=400, seed=1)
    assert {prompt(terms) for terms in held_out}.isdisjoint(asked for asked, _ in pairs)
    assert sum(format_of(text) == "words" for _, text in pairs) / 400 == pytest.approx(0.75, abs=0.07)


def test_text_is_without_end_and_padding():
    assert text_of([4, 12 + 17, 1, 0]) == "so 17"


def test_a_tally_counts_by_format():
    rows = [[("direct", True), ("direct", False)], [("words", False), ("words", False)]]
    tally = Tally.of(rows)
    assert tally.shares == {"direct": 0.5, "words": 0.5, "code": 0.0, "other": 0.0}
    assert tally.accuracy == {"direct": 0.5, "words": 0.0, "code": None, "other": None}
    assert (tally.num, tally.pass_1, tally.pass_k) == (4, 0.25, 0.5)
    assert tally.entropy == pytest.approx(math.log(2))


def test_a_kl_coefficient_tilts_shares_by_accuracy():
    accuracy = {"direct": 0.5, "words": 0.5 + 0.25 * math.log(3), "code": None}
    start = {"shares": {"direct": 0.5, "words": 0.5, "code": 0.0}, "accuracy": accuracy, "pass_1": 0.5}
    assert tilted(start, 0.5) == {"direct": pytest.approx(1 / 4), "words": pytest.approx(3 / 4), "code": 0.0}
    assert tilted(start, 1e6)["words"] == pytest.approx(0.5, abs=1e-5)
    assert tilted(start, 1e-6)["words"] == pytest.approx(1.0)


def run(scale, kl, *, end="words", seed=0):
    start = {
        "shares": {"direct": 0.5, "words": 0.3, "code": 0.2, "other": 0.0},
        "accuracy": {"direct": 0.2, "words": 0.9, "code": 0.4, "other": None},
        "pass_1": 0.5,
        "pass_k": 0.9,
        "entropy": 1.0,
    }
    shares = {form: 0.94 if form == end else 0.03 for form in FORMATS}
    points = [[0.4, 0.4, 0.2, 0.5], [*shares.values(), 0.8]]
    return {
        "mixture": "even",
        "scale": scale,
        "kl": kl,
        "lr": 3e-4,
        "seed": seed,
        "start": start,
        "curve": points,
    } | {"end": start | {"shares": shares}}


def test_a_verdict_compares_the_end_with_the_start():
    words, direct = verdict(run("small", 0.0)), verdict(run("small", 0.5, end="direct"))
    assert (words["amplified"], words["dominant"]) == ("words", True)
    assert words["was_most_accurate"] and not words["was_most_frequent"] and words["predicted"] is None
    assert direct["was_most_frequent"] and not direct["was_most_accurate"]
    assert 0 < direct["predicted"] < 0.5


def test_tables_figures_and_plots_are_of_all_runs(tmp_path):
    runs = [run("small", kl, seed=seed) for kl in (0.0, 0.5) for seed in (0, 1)]
    assert "| small, even, KL 0.5, lr 0.0003 | 0.03 ± 0.00 | 0.94 ± 0.00 |" in tables(runs)
    assert figures(runs)["amplified_was_most_accurate"] == 4 == figures(runs)["runs"]
    plots = write_plots(runs, tmp_path)
    assert [plot.name for plot in plots] == ["echo-shares-small.svg", "echo-kl-small.svg"]
    assert all("prefers-color-scheme: dark" in plot.read_text() for plot in plots)


def test_results_that_are_kept_are_not_made_again_after_an_interrupt(tmp_path):
    made = []

    def make(name, fails=False):
        made.append(name)
        if fails:
            raise KeyboardInterrupt
        return {"name": name}

    results = Results(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        results.complete({"a": lambda: make("a"), "b": lambda: make("b", fails=True), "c": lambda: make("c")})
    jobs = {name: lambda name=name: make(name) for name in "abc"}
    assert list(Results(tmp_path).complete(jobs, at_once=2)) == ["a", "b", "c"]
    assert made.count("a") == 1 and made.count("b") == 2
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_tables_replace_those_of_before_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- studies/x.py --write -->\nold\n<!-- end -->\nafter\n")
    write_tables(page, "x.py", "new")
    assert page.read_text() == "before\n<!-- studies/x.py --write -->\nnew\n<!-- end -->\nafter\n"
