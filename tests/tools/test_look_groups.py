"""A group on a page and in the terminal: advantages as the trainer had them, its row, and its history."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from threading import Event
from typing import Any

import numpy as np
import pytest
from tests.group_runs import HOSTILE, MEMBERS, ROWS, write_group_run
from tests.look_runs import write_run

from millrace.algorithms import build
from millrace.cli.app import run as millrace
from millrace.controller.state.groups import make_batch
from millrace.core.errors import MillraceError
from millrace.core.types import State
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import Choice, SampleFilter
from millrace.run_directory.run_directory import RunDirectory
from millrace.run_directory.views import tokenizer_of
from millrace.tasks.parts import Parts
from millrace.trainer.batch.flat_batch import flatten
from millrace_ui.drawing.colours import TONES, tone
from millrace_ui.record import groups
from millrace_ui.record.groups import TaskRow, TaskRows, history_of
from millrace_ui.record.tokens import advantages_of, choose, count, search
from millrace_ui.site import Site


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_group_run(tmp_path_factory.mktemp("groups") / "g")


@pytest.fixture
def site(run: RunDirectory) -> Site:
    return Site(run.path.parent, "/")


def test_advantages_are_those_of_the_rewards_by_hand(run: RunDirectory) -> None:
    with LedgerReader(run.ledger) as reader:
        group = reader.group(1)
        found = advantages_of(group, run.read_config())
    rewards = np.array([1.0, 0.0, 0.5, 0.25])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert [found.of(one) for one in group.members] == [[pytest.approx(value)] for value in expected]
    assert [len(found.by_token[one.trajectory_id]) for one in group.members] == [4, 4, 2, 7]


@pytest.mark.parametrize(
    "algorithm", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce", "max_rl", "mt_grpo", "raft"]
)
def test_advantages_are_those_of_the_trainer_in_the_whole_batch(tmp_path: Path, algorithm: str) -> None:
    run = write_group_run(tmp_path / "g", steps=2, algorithm=algorithm, max_tokens=8)
    config = run.read_config()
    with LedgerReader(run.ledger) as reader:
        groups = [reader.group(0), reader.group(1)]
    for group in groups:
        for one in group.members:
            one.trained_version = 2 if one.trained_version is not None else None
    flat = flatten(make_batch(1, groups), build(config.algorithm), max_tokens=8, minibatches=1)
    found = [advantages_of(group, config) for group in groups]
    trained = [one for group in groups for one in group.members if one.trained_version is not None]
    of_batch = np.split(flat.advantages_C, np.cumsum([len(one.columns) for one in trained])[:-1])
    for one, values, num in zip(trained, of_batch, flat.trained_S, strict=True):
        mine = found[one.group_id]
        assert mine.by_token.get(one.trajectory_id, []) == (values.tolist() if num else [])
        assert (one.trajectory_id in mine.masked) == (num == 0)


@pytest.mark.parametrize(("algorithm", "needs"), [("ppo", "a critic"), ("reinforce_pp", "all other groups")])
def test_an_advantage_that_rewards_do_not_tell_is_left_out_in_words(
    tmp_path: Path, algorithm: str, needs: str
) -> None:
    run = write_group_run(tmp_path / "g", steps=1, algorithm=algorithm)
    page = Site(tmp_path, "/").group("g", {"id": ["0"]}).html
    assert needs in page and "The advantages are not recorded" in page
    assert 'value="advantage"' not in page
    with LedgerReader(run.ledger) as reader:
        assert not advantages_of(reader.group(0), run.read_config()).by_token


def test_a_group_that_no_version_trained_on_has_no_advantage(run: RunDirectory) -> None:
    with LedgerReader(run.ledger) as reader:
        group = reader.group(8)
    failed = group.members[-1]
    assert failed.state is State.FAILED
    found = advantages_of(group, run.read_config())
    assert found.of(failed) == [] and len(found.by_token) == MEMBERS - 1
    for one in group.members:
        one.trained_version = None
    assert "No version trained" in advantages_of(group, run.read_config()).unknown


def test_a_group_shows_its_row_its_attempts_and_its_history(site: Site) -> None:
    html = site.group("g", {"id": ["4"]}).html
    assert html.count('<article class="sample"') == MEMBERS
    for text in "Reference answer", "answer &lt;b&gt;1&lt;/b&gt;", "<td class=short>level", "drawn 3 times":
        assert text in html
    assert "mean 1 and largest 1.25" in html
    assert "<b>4</b>" in html and "<polyline points=" in html
    assert HOSTILE not in html and "&lt;script&gt;" in html


def test_a_failed_attempt_stands_beside_the_others_and_its_reason_is_text(site: Site) -> None:
    html = site.group("g", {"id": ["8"]}).html
    assert "3 trained, 1 failed" in html
    assert "failed: raised &lt;script&gt;" in html and HOSTILE not in html


def test_the_colour_of_tokens_is_in_the_address_and_in_every_link(site: Site) -> None:
    html = site.group("g", {"id": ["1"], "color": ["advantage"]}).html
    assert 'value="advantage" checked' in html
    assert "trajectory=4" in html and "color=advantage" in html and "color=logprob" not in html
    assert f' a{2 * TONES}"' in html and ", advantage 1.5" in html
    assert 'value="logprob" checked' in site.group("g", {"id": ["1"], "color": ["<b>"]}).html
    assert 'value="version" checked' in site.samples("g", {"color": ["version"]}).html


@pytest.mark.parametrize(("advantage", "largest", "at"), [(1, 1, 8), (-1, 1, 0), (0.1, 1, 4), (0, 0, 4)])
def test_a_tone_tells_the_sign_and_the_size(advantage: float, largest: float, at: int) -> None:
    assert tone(advantage, largest) == at


def test_a_trajectory_alone_has_its_advantage_and_its_row(site: Site) -> None:
    html = site.samples("g", {"trajectory": ["4"]}).html
    assert "advantage 1.5" in html and "Reference answer" in html
    assert 'id=1">group 1</a>' in html
    assert "There is none" in site.samples("g", {"trajectory": ["999"]}).html


@pytest.mark.parametrize(
    ("only", "num"),
    [
        (SampleFilter(), 36),
        (SampleFilter(state="failed"), 1),
        (SampleFilter(reason="RAISED <script"), 1),
        (SampleFilter(reward_min=1.0), 4),
        (SampleFilter(reward_min=0.5, reward_max=0.5), 9),
        (SampleFilter(tokens_min=5), 9),
        (SampleFilter(tokens_max=4, state="trained"), 27),
        (SampleFilter(tokens_max=1), 0),
    ],
)
def test_a_filter_chooses_and_counts_the_same(run: RunDirectory, only: SampleFilter, num: int) -> None:
    assert count(run, Choice.NEWEST, only) == num
    shown = choose(run, None, Choice.NEWEST, 100, only=only)
    assert len(shown) == num
    assert all(only.reward_min is None or one.reward >= only.reward_min for one in shown)
    rewarded = [one for one in shown if one.reward is not None]
    best = choose(run, None, Choice.BEST, 100, only=only)
    assert [one.reward for one in best] == sorted((one.reward for one in rewarded), reverse=True)


def test_a_search_looks_only_at_what_a_filter_lets_through(run: RunDirectory) -> None:
    page = search(run, tokenizer_of(run), "dcba", 100, only=SampleFilter(reward_max=0.25))
    assert (len(page.samples), page.looked_at, page.before) == (9, 22, None)


def test_the_list_keeps_its_filter_and_says_how_many_it_lets_through(site: Site) -> None:
    query = {"reward_min": ["0"], "reward_max": ["0.5"], "tokens_min": ["2"], "state": ["trained"]}
    html = site.samples("g", query).html
    assert "31 trajectories. The first 10 are shown." in html
    assert "&amp;state=trained&amp;reward_min=0.0&amp;reward_max=0.5&amp;tokens_min=2&amp;num=20" in html
    assert '<option value="trained" selected>' in html and 'name="reward_max" value="0.5"' in html
    searched_html = site.samples("g", query | {"text": ["dcba"]}).html
    assert "trajectories that the filter lets through" in searched_html


@pytest.mark.parametrize("value", ["nan", "inf", "x", "-", "1e999", "<b>"])
def test_a_number_that_is_none_filters_nothing(site: Site, value: str) -> None:
    html = site.samples("g", {"reward_min": [value], "tokens_max": [value], "state": [value]}).html
    assert "are shown" not in html and "<b>" not in html.replace("<b>newest</b>", "")


def test_the_history_of_a_row_has_each_draw_the_newest_first(run: RunDirectory) -> None:
    with LedgerReader(run.ledger) as reader:
        row_id = reader.group(4).row_id
        history = history_of(reader, row_id)
        groups = [reader.group(draw.group_id) for draw in history.draws]
    assert history.first == 0 and len(history.draws) == 3
    assert [group.row_id for group in groups] == [row_id] * 3
    assert [draw.group_id for draw in history.draws] == sorted((g.group_id for g in groups), reverse=True)
    for draw, group in zip(history.draws, groups, strict=True):
        rewards = [one.reward for one in group.members if one.reward is not None]
        assert draw.reward_mean == pytest.approx(fmean(rewards))
        assert draw.trained == (group.group_id + 1,)
        assert draw.sampled == (max(0, group.group_id - 1), group.group_id)
        assert (draw.tokens_mean, draw.tokens_max) == (4.25, 7)


def test_a_history_that_is_cut_goes_on_where_it_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_WIDTH", 2)
    with LedgerReader(run.ledger) as reader:
        row_id = reader.group(0).row_id
        whole = history_of(reader, row_id).draws
        parts, stop = [], None
        while stop != 0:
            part = history_of(reader, row_id, stop, look_s=0)
            parts, stop = parts + part.draws, part.first
        monkeypatch.setattr(groups, "DRAWS_MAX", 2)
        first = history_of(reader, row_id)
        rest = history_of(reader, row_id, first.first)
    assert parts == whole and len(first.draws) == 2
    assert first.draws + rest.draws == whole


def test_a_page_says_how_far_back_it_looked(
    run: RunDirectory, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "DRAWS_MAX", 1)
    html = site.group("g", {"id": ["4"]}).html
    assert "on were looked at" in html and "Look further back" in html


def test_a_row_whose_data_were_changed_is_said_and_not_shown(tmp_path: Path) -> None:
    run = write_group_run(tmp_path / "g", steps=2)
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"p{n}", "answer": "other"}) + "\n" for n in range(ROWS)))
    html = Site(tmp_path, "/").group("g", {"id": ["1"]}).html
    assert "data were changed" in html and "other</pre>" not in html
    data.unlink()
    html = Site(tmp_path, "/").group("g", {"id": ["1"]}).html
    assert "cannot be read" in html and run.ledger.exists()


def test_a_users_function_is_never_called_for_a_page(tmp_path: Path) -> None:
    run = write_group_run(tmp_path / "g", steps=1)
    tree = json.loads(run.config.read_text())
    tree["task"] = {"kind": "function", "path": f"{tmp_path}/rows.py:rows"}
    run.config.write_text(json.dumps(tree))
    (tmp_path / "rows.py").write_text("raise SystemExit('it was called')\n")
    assert "a function, which only a run calls" in Site(tmp_path, "/").group("g", {"id": ["0"]}).html


def test_data_that_take_long_are_waited_for_by_the_page(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Event()

    def slow(*given: Any) -> Parts:
        release.wait(60)
        return Parts(*given)

    monkeypatch.setattr("millrace_ui.record.groups.Parts", slow)
    rows = TaskRows(run.read_config(), lambda: tokenizer_of(run))
    row = rows.row(4, "words.jsonl:2", f"{HOSTILE} 1", wait_s=0.01)
    release.set()
    assert row.again and "are being read" in row.unknown
    later = rows.row(4, "words.jsonl:2", f"{HOSTILE} 1", wait_s=None)
    assert later == TaskRow("answer <b>1</b>", {"level": "1", "tags": f'["{HOSTILE}","x"]'})


def test_a_group_of_another_number_is_said(site: Site) -> None:
    with pytest.raises(MillraceError, match="there is no group 99"):
        site.group("g", {"id": ["99"]})
    with pytest.raises(MillraceError, match="which group"):
        site.group("g", {"id": ["x"]})


def test_show_has_the_group_in_the_terminal(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert millrace(["show", str(run.path), "--group", "1"]) == 0
    said = capsys.readouterr().out
    for text in (
        "reference answer",
        "answer <b>",
        "reward 1, advantage 1.52",
        "The row over the run",
        "1 (this)",
    ):
        assert text in said
    assert millrace(["show", str(run.path), "--group", "1", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert [one["advantages"][0] for one in view["attempts"]] == pytest.approx(
        [1.5213, -1.1832, 0.169, -0.507], abs=1e-3
    )
    assert view["columns"]["level"] and view["history"]["looked_back_to_group"] == 0
    assert len(view["history"]["draws"]) == 3
    assert millrace(["show", str(run.path), "--group", "1", "--step", "1"]) == 2


def test_show_has_the_advantage_of_a_trajectory(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert millrace(["show", str(run.path), "--trajectory", "4", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["advantages"] == [pytest.approx(1.5213, abs=1e-3)]
    assert millrace(["show", str(run.path), "--trajectory", "4"]) == 0
    assert "advantages" in capsys.readouterr().out


def test_a_group_of_a_run_without_data_of_its_rows_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=1)
    html = Site(tmp_path, "/").group("a", {"id": ["2"]}).html
    assert "trajectory 4" in html and "The row over the run" in html
