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
from millrace.config.freeze import record
from millrace.config.tables.task import EnvironmentRewardSection
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.completion.columns import TokenColumns
from millrace.core.events import Event, Events
from millrace.core.types import Finish, Group, State
from millrace.diagnose.examine import _texts
from millrace.episodes.gateway.conversation import CAUSES as GATEWAY_CAUSES
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import Choice, Sample
from millrace.observe.conversation_times import CAUSES, conversation, ended_by, sampled_tokens, turns_of
from millrace.observe.live.live_view import sample_line
from millrace.observe.live.status import Status
from millrace.observe.shown_samples import as_markdown, outcome_line, render_sample
from millrace.observe.sinks.jsonl import EventLog
from millrace.observe.terminal import Terminal
from millrace.run.event_sources import TrajectorySampler
from millrace.run_directory.run_directory import RunDirectory
from millrace.run_directory.views import tokenizer_of, trajectory_record
from millrace_ui.drawing.fragments import sample as sample_html
from millrace_ui.drawing.fragments import samples as samples_html
from millrace_ui.record.groups import read_member
from millrace_ui.record.story import Story
from millrace_ui.record.tokens import Shown, choose

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


def begun(tmp_path: Path) -> RunDirectory:
    """A run directory without a ledger."""
    path = tmp_path / "run"
    path.mkdir()
    directory = RunDirectory(path)
    (tmp_path / "start").mkdir()
    make_character_tokenizer(tmp_path / "start", "abcdefghijklmnopqrstuvwxyz")
    record(config(tmp_path / "start"), directory.config)
    return directory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A trained group of two episodes, and one whose environment raised while it waited."""
    directory = begun(tmp_path)
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
            "sequence": 1,
            "causes": [],
            "text": "ab",
        },
        {
            "turn": 1,
            "role": "environment",
            "tokens": 3,
            "versions": [],
            "reward": None,
            "after": None,
            "sequence": 1,
            "causes": [],
            "text": "xyz",
        },
        {
            "turn": 2,
            "role": "model",
            "tokens": 2,
            "versions": [5],
            "reward": 0.5,
            "after": None,
            "sequence": 1,
            "causes": [],
            "text": "ac",
        },
    ]
    assert letters(sampled_tokens(episode())) == "abac"
    assert ended_by(ENDED) == "turns"
    assert ended_by({"ended_by_turns": 0.0, "won": 1.0}) == ""


def forked() -> TokenColumns:
    """Turn 1 is "a". Turns 2 and 3 begin sequences in place of the prompt, and turn 4 follows turn 1."""
    columns = TokenColumns()
    for token, after in (A, None), (A + 1, 0), (A + 2, 0), (A + 3, 1):
        if after is not None:
            columns.fork(after, 0)
            columns.observe([A + 25])
        columns.append(token, -0.5, 1)
    return columns


@pytest.mark.parametrize(
    ("counts", "causes"),
    [
        ({"forks_history": 2.0, "forks_template": 0.0}, [("history",), ("history",), ()]),
        ({"forks_history": 1.0, "forks_tools": 1.0}, [("history", "tools"), ("history", "tools"), ()]),
        ({"forks_template": 1.0}, [("template",), (), ()]),  # the second one has no complete turn yet
        ({"forks_of_a_road": 2.0}, [(), (), ()]),
    ],
)
def test_a_sequence_has_the_cause_that_the_metrics_tell(counts: dict, causes: list) -> None:
    turns = turns_of(forked(), counts)
    begins = [turn for turn in turns if turn.after is not None]
    assert [(turn.sequence, turn.after) for turn in begins] == [(2, 0), (3, 0), (1, 1)]
    assert [turn.causes for turn in begins] == causes
    assert [turn.sequence for turn in turns if turn.role == "model"] == [1, 2, 3, 1]


def test_the_gateway_counts_the_causes_that_are_shown() -> None:
    assert set(CAUSES) == set(GATEWAY_CAUSES)


@pytest.fixture
def agents(tmp_path: Path) -> RunDirectory:
    """Trajectory 0 has forks, and trajectory 1 a turn of 120 tokens."""
    directory = begun(tmp_path)
    group = make_group(0)
    long = TokenColumns.of([A] * 120, [-0.5] * 120, 1)
    for member, columns in zip(group.members, (forked(), long), strict=True):
        member.columns, member.replica, member.lease = columns, "replica-0", 1
        member.state, member.reward, member.finish = State.BUFFERED, 1.0, Finish.STOP
        member.metrics = ENDED | {"forks_history": 2.0}
    ledger = SqliteLedger(directory.ledger, run={})
    ledger.admit([group])
    ledger.close()
    return directory


def member(run: RunDirectory, trajectory_id: int) -> list[Shown]:
    found = read_member(run, run.read_config(), tokenizer_of(run), trajectory_id)
    return found.members if found else []


def test_each_place_says_why_a_sequence_begins(agents, capsys) -> None:
    begins = "environment 1: 1 tokens, observed, sequence 2 (rewritten history)"
    assert millrace(["show", str(agents.path), "--trajectory", "0"]) == 0
    assert begins in " ".join(capsys.readouterr().out.replace("─", " ").split())
    (one,) = member(agents, 0)
    assert begins in sample_html(one)
    assert "environment 3: 1 tokens, observed, sequence 1, follows turn 1<" in sample_html(one)


def test_a_turn_is_shown_with_every_token_beside_its_text(run, capsys) -> None:
    assert millrace(["show", str(run.path), "--trajectory", "0", "--turn", "2", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    tokens = [(one["token"], one["text"], one["version"], one["turn"]) for one in view["tokens"]]
    assert tokens == [(A, "a", 5, 2), (A + 2, "c", 5, 2)]
    assert [turn["text"] for turn in view["turns"]] == ["ac"]
    assert millrace(["show", str(run.path), "--trajectory", "0", "--turn", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines if line.split()[:1] == ["3"]] == [[str(A + 24), "y"]]
    assert millrace(["show", str(run.path), "--trajectory", "0", "--turn", "3"]) == 1
    assert "has no turn 3: it has 2" in capsys.readouterr().err
    assert millrace(["show", str(run.path), "--turn", "1"]) == 2
    assert "--trajectory" in capsys.readouterr().err


def test_a_turn_of_many_tokens_is_shown_whole(agents, capsys) -> None:
    shown = ["show", str(agents.path), "--trajectory", "1"]
    assert millrace([*shown, "--turn", "1"]) == 0
    assert "more: --json" not in capsys.readouterr().out
    assert millrace(shown) == 0
    assert "more: --json" in capsys.readouterr().out


def test_the_page_has_the_ids_of_the_tokens_that_it_shows(run) -> None:
    (best,) = member(run, 0)
    html = samples_html([best])
    assert f'data-ids="{A}"' in html and f'title="observed" data-ids="{A + 23}">x<' in html
    assert 'type="checkbox" name="ids"' in html
    assert member(run, 10**6) == []


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
    text = "Search raised KeyError, 7 tokens (3 observed), not answered, versions 3 to 5"
    assert text in " ".join(said.split())


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
    assert html.count('<span title="observed"') == 3 and html.count("<i ") == 4
    assert "nan" not in html and "ended by the budget of turns" in html


def test_an_episode_may_be_cut_in_any_turn(run) -> None:
    for most, shown in (1, ["a"]), (2, ["ab"]), (3, ["ab", "x"]), (7, ["ab", "xyz", "ac"]):
        (best,) = choose(run, tokenizer_of(run), Choice.BEST, 1, most)
        assert ["".join(piece.text for piece in turn.token_texts) for turn in best.turns] == shown
        assert best.tokens_left_out == 7 - most


def sample_event(run: RunDirectory) -> Event:
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
    sample = sample_event(run)
    assert sample.kind == "sample" and sample.fields["versions"] == [3, 4, 5]
    assert [turn["text"] for turn in sample.fields["turns"]] == ["ab", "xyz", "ac"]
    assert outcome_line(sample.fields).endswith(
        "7 tokens (3 observed), ended by the budget of turns, versions 3 to 5"
    )
    assert "environment 1: 3 tokens, observed:\n\n    xyz" in as_markdown(sample.fields)


def test_the_live_line_names_who_wrote_what(run) -> None:
    status = Status()
    status(sample_event(run))
    assert "model: ab environment: xyz model: ac" in sample_line(status)


def test_turns_fit_the_terminal_without_a_tokenizer(run) -> None:
    console = Terminal(file=io.StringIO(), width=60)
    fields = sample_event(run).fields
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
    fields_by_kind = {
        "finished": {"tokens": 4},
        "observed": {"tokens": 2},
        "scored": {"outcome": "scored", "reason": ""},
    }
    for kind, fields in fields_by_kind.items():
        log(event(kind, 1.0, trajectory_id=1, **fields))
    log.close()
    story = Story(tmp_path / "events.jsonl", made)
    story.update()
    assert story.evidence.environment.num_answers == acts
    assert story.evidence.outcomes["scored"] == 1
