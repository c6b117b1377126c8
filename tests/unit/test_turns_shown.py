"""An episode as a conversation, everywhere that shows a completion."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledger_records import make_group, step_of
from observe_events import event, step
from tests.look_runs import config

from millrace.cli.app import run as millrace
from millrace.compose.rewarded_texts import _texts
from millrace.compose.sampler import TrajectorySampler
from millrace.config.freeze import record
from millrace.config.tables.task import EnvironmentRewardSection
from millrace.core.completion.columns import TokenColumns
from millrace.core.events import Event, Events
from millrace.core.types import Finish, Group, State
from millrace.environments.tokenizer import make_character_tokenizer
from millrace.ledger import SqliteLedger
from millrace.ledger.reading.reader import LedgerReader
from millrace.ledger.reading.samples import Choice, Sample
from millrace.look.drawing.fragments import sample as sample_html
from millrace.look.record.story import Story
from millrace.look.record.tokens import choose
from millrace.look.record.views import tokenizer_of, trajectory_record
from millrace.observe.conversation import conversation, ended_by, sampled_tokens, turns_of
from millrace.observe.live.live_view import sample_line
from millrace.observe.live.status import Status
from millrace.observe.samples import as_markdown, outcome_line, render_sample
from millrace.observe.sinks.jsonl import EventLog
from millrace.observe.terminal import Terminal
from millrace.run_directory.run_directory import RunDirectory

ENDED = {"turns": 2.0, "turn_1": 0.25, "turn_2": 0.5, "ended_by_turns": 1.0, "ended_by_tokens": 0.0}
A = 5  # the id of the letter a


def episode() -> TokenColumns:
    """The model writes "ab" and then, under a later version, "ac". The environment answers "xyz"."""
    columns = TokenColumns()
    likely = ([A, A + 1], [-0.5, -1.5])
    columns.append(A, -0.5, 3, likely)
    columns.append(A + 1, -0.25, 4, likely)
    columns.observe([A + 23, A + 24, A + 25])
    columns.append(A, -1.0, 5, likely)
    columns.append(A + 2, -2.0, 5, likely)
    return columns


def letters(tokens) -> str:
    return "".join(chr(ord("a") + token - A) for token in tokens)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A trained group of two episodes, and one whose environment raised while it waited."""
    path = tmp_path / "run"
    path.mkdir()
    directory = RunDirectory(path)
    (tmp_path / "start").mkdir()
    make_character_tokenizer(tmp_path / "start", "abcdefghijklmnopqrstuvwxyz")
    record(config(tmp_path / "start"), directory.config)
    ledger = SqliteLedger(directory.ledger, run={})
    trained, failed = make_group(0), make_group(1)
    for member in (*trained.members, *failed.members):
        member.columns, member.replica, member.lease = episode(), "replica-0", 2
        member.state, member.reward, member.finish = State.BUFFERED, 0.75, Finish.LENGTH
        member.metrics = ENDED
    for member in failed.members:
        member.state, member.reward, member.finish = State.FAILED, None, Finish.TURN
        member.metrics, member.reason = {"turn_1": 0.25}, "Search raised KeyError"
    ledger.admit([trained, failed])
    ledger.flush()
    for version in range(1, 6):
        ledger.commit_step(step_of(version))
    ledger.commit_step(step_of(6, trained))
    ledger.close()
    return directory


def test_turns_have_role_tokens_versions_and_rewards() -> None:
    assert conversation(episode(), ENDED, letters) == [
        {
            "turn": 1,
            "role": "model",
            "tokens": 2,
            "versions": [3, 4],
            "reward": 0.25,
            "after": None,
            "text": "ab",
        },
        {
            "turn": 1,
            "role": "environment",
            "tokens": 3,
            "versions": [],
            "reward": None,
            "after": None,
            "text": "xyz",
        },
        {
            "turn": 2,
            "role": "model",
            "tokens": 2,
            "versions": [5],
            "reward": 0.5,
            "after": None,
            "text": "ac",
        },
    ]
    assert letters(sampled_tokens(episode())) == "abac"
    assert ended_by(ENDED) == "turns"
    assert ended_by({"ended_by_turns": 0.0, "won": 1.0}) == ""


def test_a_completion_that_no_environment_answered_has_no_turns() -> None:
    columns = TokenColumns.of([A], [-1.0], 0)
    assert turns_of(columns, {"correct": 1.0, "turn_1": 1.0}) == []
    assert [turn.role for turn in turns_of(columns, {"ended_by_turns": 0.0})] == ["model"]


@pytest.mark.parametrize("asked", [["--samples", "1"], ["--trajectory", "0"]])
def test_the_command_shows_each_turn(run, capsys, asked: list[str]) -> None:
    assert millrace(["show", str(run.path), *asked]) == 0
    said = capsys.readouterr().out
    assert "model 1: 2 tokens, versions 3 to 4, reward 0.25" in said
    assert "environment 1: 3 tokens, observed" in said and "xyz" in said
    assert "nan" not in said.lower() and "completion" not in said


def test_an_episode_that_failed_while_it_waited_is_shown(run, capsys) -> None:
    assert millrace(["show", str(run.path), "--failed", "--samples", "1"]) == 0
    said = capsys.readouterr().out
    told = "Search raised KeyError, 7 tokens (3 observed), not answered, versions 3 to 5"
    assert told in " ".join(said.split())


def test_json_has_null_for_what_an_observed_token_lacks(run, capsys) -> None:
    assert millrace(["show", str(run.path), "--trajectory", "0", "--json"]) == 0
    view = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert [token["version"] for token in view["tokens"]] == [3, 4, None, None, None, 5, 5]
    assert [token["logprob"] for token in view["tokens"]][1:4] == [-0.25, None, None]
    assert [len(token["top_logprobs"]) for token in view["tokens"]] == [2, 2, 0, 0, 0, 2, 2]
    assert (view["ended_by"], [turn["text"] for turn in view["turns"]]) == ("turns", ["ab", "xyz", "ac"])


def test_an_export_has_turns_and_no_number_for_observed_tokens(run) -> None:
    with LedgerReader(run.ledger) as reader:
        (group,) = reader.groups([0])
    one = trajectory_record(group, group.members[0], tokenizer_of(run), tokens=True)
    assert one["logprobs"] == [-0.5, -0.25, None, None, None, -1.0, -2.0]
    assert one["versions"] == [3, 4, None, None, None, 5, 5]
    assert [turn["role"] for turn in one["turns"]] == ["model", "environment", "model"]
    assert one["staleness"] == 2


def test_the_page_shows_turns_and_colours_no_observed_token(run) -> None:
    (best,) = choose(run, tokenizer_of(run), Choice.BEST, 1)
    html = sample_html(best)
    assert "environment 1: 3 tokens, observed" in html and "reward 0.25" in html
    assert html.count('<span title="observed">') == 3 and html.count("<i ") == 4
    assert "nan" not in html and "ended by the budget of turns" in html


def test_an_episode_may_be_cut_in_any_turn(run) -> None:
    for most, shown in (1, ["a"]), (2, ["ab"]), (3, ["ab", "x"]), (7, ["ab", "xyz", "ac"]):
        (best,) = choose(run, tokenizer_of(run), Choice.BEST, 1, most)
        assert ["".join(piece.text for piece in turn.token_texts) for turn in best.turns] == shown
        assert best.tokens_left_out == 7 - most


def told_sample(run: RunDirectory) -> Event:
    heard, events = list[Event](), Events(lambda: 0.0, lambda: 0.0)
    events.subscribe(heard.append)
    with LedgerReader(run.ledger) as reader:
        made = SimpleNamespace(
            steps_after=lambda version: reader.steps(), group=lambda group_id: reader.group(group_id)
        )
        TrajectorySampler(events, made, letters, every=1)(step(1.0, 6))
    (sample,) = heard
    return sample


def test_a_sample_event_has_the_turns(run) -> None:
    sample = told_sample(run)
    assert sample.kind == "sample" and sample.fields["versions"] == [3, 4, 5]
    assert [turn["text"] for turn in sample.fields["turns"]] == ["ab", "xyz", "ac"]
    assert outcome_line(sample.fields).endswith(
        "7 tokens (3 observed), ended by the budget of turns, versions 3 to 5"
    )
    assert "environment 1: 3 tokens, observed:\n\n    xyz" in as_markdown(sample.fields)


def test_the_live_line_names_who_wrote_what(run) -> None:
    status = Status()
    status(told_sample(run))
    assert "model: ab environment: xyz model: ac" in sample_line(status)


def test_turns_fit_the_terminal_without_a_tokenizer(run) -> None:
    console = Terminal(file=io.StringIO(), width=60)
    fields = told_sample(run).fields
    console.print(render_sample(fields | {"turns": conversation(episode(), ENDED, None)}))
    text = console.file.getvalue()
    assert "its tokens cannot be read" in text and max(map(len, text.splitlines())) <= 60


def test_the_doctor_reads_what_the_model_wrote_and_not_the_answers() -> None:
    group: Group = make_group(0)
    member = group.members[0]
    member.columns, member.reward = episode(), 1.0
    (text,) = _texts([Sample(group, member)], letters)
    assert text.completion == "abac"


@pytest.mark.parametrize("acts", [False, True])
def test_the_page_reads_answers_only_where_an_environment_gives_them(tmp_path: Path, acts: bool) -> None:
    made = config(tmp_path)
    if acts:
        reward = EnvironmentRewardSection(path="search.py:Search")
        made = made.model_copy(update={"reward": reward})
    log = EventLog(tmp_path / "events.jsonl")
    told = {
        "finished": {"tokens": 4},
        "observed": {"tokens": 2},
        "scored": {"outcome": "scored", "reason": ""},
    }
    for kind, fields in told.items():
        log(event(kind, 1.0, trajectory_id=1, **fields))
    log.close()
    story = Story(tmp_path / "events.jsonl", made)
    story.update()
    assert story.evidence.environment.num_answers == acts
    assert story.evidence.outcomes["scored"] == 1
