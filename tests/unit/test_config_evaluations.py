"""`[[evaluations]]`: a list of tables, each checked as the tables of training are."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.checks.derived import derived, resolved_lines
from millrace.checks.preflight import preflight
from millrace.config.freeze import dump, recorded, restore
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.config.tables.task import FileTaskSection, GymTaskSection
from millrace.core.errors import ConfigError, DataError
from millrace.evaluation.evaluate import held_out_config
from millrace.run.content_digests import content_digests, refuse_other_content
from millrace.run.resume import check_resume

GYM = '[model]\npath = "m"\n[task]\nkind = "gym"\nname = "gcd"\n[reward]\nkind = "gym"\n'
ACTS = '{ kind = "environment", path = "a.py:Act" }\n'
FILE = '[model]\npath = "m"\n[task]\nkind = "file"\npath = "a.jsonl"\n[reward]\nkind = "exact"\n'


def loaded(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load(path)


def test_without_a_task_of_its_own_an_evaluation_has_other_rows_of_the_gym_task(tmp_path: Path) -> None:
    config = loaded(tmp_path, GYM + '[[evaluations]]\nname = "held-out"\npatience = "none"\n')
    (one,) = config.evaluations
    task = config.of_evaluation(one).task
    assert isinstance(task, GymTaskSection) and isinstance(config.task, GymTaskSection)
    assert task.data_seed == config.task.data_seed + 1
    assert config.of_evaluation(one).reward == config.reward


def test_an_evaluation_is_run_again_by_its_name(tmp_path: Path) -> None:
    text = FILE + '[[evaluations]]\nname = "b"\ntask = { kind = "file", path = "b.jsonl" }\nreward = "math"\n'
    config = loaded(tmp_path, text + '[[evaluations]]\nname = "none"\ncanary = "wrong-gold"\n')
    chosen = held_out_config(config, None, seed=3, data_seed=2, evaluation="b")
    assert isinstance(chosen.task, FileTaskSection) and chosen.task.path == str(tmp_path / "b.jsonl")
    assert (chosen.reward.kind, chosen.seed) == ("math", 3)
    for name in "none", "c":
        with pytest.raises(ConfigError, match=f"no evaluation '{name}' to run again.\n.*: b$"):
            held_out_config(config, None, seed=3, data_seed=2, evaluation=name)


def test_an_evaluation_that_is_run_again_has_its_own_rows_of_the_gym_task(tmp_path: Path) -> None:
    text = GYM + '[[evaluations]]\nname = "others"\n[[evaluations]]\nname = "own"\n'
    config = loaded(tmp_path, text + 'task = { kind = "gym", name = "gcd", data_seed = 7 }\n')
    for one in config.evaluations:
        chosen = held_out_config(config, None, seed=0, data_seed=2, evaluation=one.name)
        assert chosen.task == config.of_evaluation(one).task


def test_paths_are_relative_to_the_file_and_the_record_gives_all_of_it_back(tmp_path: Path) -> None:
    text = FILE + '[[evaluations]]\nname = "b"\ntask = { kind = "file", path = "b.jsonl" }\nreward = "math"\n'
    config = loaded(tmp_path, text)
    task = config.evaluations[0].task
    assert isinstance(task, FileTaskSection) and task.path == str(tmp_path / "b.jsonl")
    assert config.evaluations[0].reward is not None and config.evaluations[0].reward.kind == "math"
    assert restore(recorded(config), tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE + '[[evaluations]]\nname = "b"\n', r"`evaluations` \(b\) needs a `task` of its own"),
        (GYM + '[[evaluations]]\nname = "b"\nevry = 2\n', r"unknown key `evaluations\[0\].evry`"),
        (GYM + '[[evaluations]]\nname = "b"\nevery = 0\n', r"`evaluations\[0\].every` \(0\) must be"),
        (GYM + '[[evaluations]]\nname = "B c"\n', r"`evaluations\[0\].name` \('B c'\)"),
        (GYM + "[[evaluations]]\nevery = 2\n", r"`evaluations\[0\].name` is missing"),
        (GYM + '[[evaluations]]\nname = "b"\n[[evaluations]]\nname = "b"\n', "'b' is the name of two"),
        (GYM + '[[evaluations]]\nname = "b"\nby = "majority"\nsamples = 1\n', "`samples` of at least 2"),
        (GYM + '[[evaluations]]\nname = "b"\nby = "majority"\nreward = ' + ACTS, "an episode has none"),
        (GYM + '[[evaluations]]\nname = "b"\nevery = 7\nkeep_best = true\n', "must be a multiple of"),
        (
            GYM + '[[evaluations]]\nname = "b"\ntask = { kind = "file", path = "x" }\n',
            r'`evaluations` \(b\): `reward.kind` "gym" needs',
        ),
        (
            GYM.replace("[model]", '[rollout]\nservers = ["http://h"]\n[model]')
            + '[[evaluations]]\nname = "b"\n',
            "`rollout.servers`",
        ),
    ],
)
def test_what_cannot_be_is_said_with_its_key_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        loaded(tmp_path, text)
    assert "run.toml:" in str(raised.value)


def test_what_a_dry_run_prints_loads_to_the_same_configuration(tmp_path: Path) -> None:
    text = FILE + '[[evaluations]]\nname = "b"\ntask = { kind = "file", path = "b.jsonl", answer = "c" }\n'
    text += '[[evaluations]]\nname = "c"\nsamples = 0\nshare = 0.25\n'
    text += 'task = { kind = "gym", name = "gcd" }\nreward = "gym"\n'
    config = loaded(tmp_path, text)
    (tmp_path / "printed").mkdir()
    assert loaded(tmp_path / "printed", "\n".join(resolved_lines(dump(config)))) == config
    assert derived(config)["Evaluations"]["c"] == (
        "of 6 versions, 64 prompts x (1 greedy + 0) = 64 completions; the evaluator computes for at most "
        "25% of the time"
    )


def test_a_file_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    config = loaded(
        tmp_path, GYM + '[[evaluations]]\nname = "b"\nreward = "math"\ntask = { kind = "file", path = "x" }\n'
    )
    message = rf"`evaluations` \(b\): no data at `{tmp_path / 'x'}`"
    with pytest.raises(ConfigError, match=message):
        preflight(config, tmp_path / "run")


def test_a_resumed_run_may_change_when_it_evaluates_and_not_what(tmp_path: Path) -> None:
    plain = loaded(tmp_path, GYM)
    one = loaded(tmp_path, GYM + '[[evaluations]]\nname = "b"\n')
    patient = loaded(tmp_path, GYM + '[[evaluations]]\nname = "b"\npatience = 9\nevery = 3\n')
    others = loaded(tmp_path, GYM + '[[evaluations]]\nname = "b"\nprompts = 9\n')
    check_resume(plain, one)
    check_resume(one, plain)
    check_resume(one, patient)
    with pytest.raises(ConfigError, match=r"`evaluations.b.prompts`: 64 -> 9"):
        check_resume(one, others)


def test_its_data_file_is_part_of_what_a_resumed_run_must_find_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.jsonl").write_text("{}")
    text = FILE + '[[evaluations]]\nname = "b"\ntask = { kind = "file", path = "b.jsonl" }\n'
    before = content_digests(loaded(tmp_path, text))
    refuse_other_content(before, content_digests(loaded(tmp_path, FILE)))
    (tmp_path / "b.jsonl").write_text('{"prompt": "other"}')
    with pytest.raises(DataError, match=r"evaluations.b.task.path: b.jsonl"):
        refuse_other_content(before, content_digests(loaded(tmp_path, text)))
