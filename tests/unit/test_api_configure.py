"""From what a script passes to a checked configuration, and every refusal before a worker starts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.group_runs import write_group_run

import millrace
from millrace.api.configure import Components, PreparedConfig, prepare
from millrace.api.helper_process import _request
from millrace.api.train import OWN_KEYWORDS
from millrace.cli import app
from millrace.config.carried import absolute, load_carried, relative
from millrace.config.freeze import recorded
from millrace.core.errors import ConfigError, DataError, RewardError
from millrace.tasks.rows import open_rows

MODEL = {"model": {"path": "m"}}
ROWS = [{"prompt": "stone>", "answer": "enots"}, {"prompt": "river>", "answer": "revir"}]


def backwards(completion: str, answer: str) -> float:
    return float(completion == answer)


def prepared(
    config: Any = MODEL, *, reward: Any = backwards, rows: Any = ROWS, **keywords: Any
) -> PreparedConfig:
    named = {name: keywords.pop(name, None) for name in ("algorithm", "schedule")}
    return prepare(config, Components(reward, rows, **named), keywords, OWN_KEYWORDS)


def test_dict_file_and_keywords_give_the_same_configuration(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\nschedule = "areal"\n[model]\npath = "m"\n[optimizer]\nlr = 0.5\n')
    tree = {"steps": 7, "schedule": "areal", "model": {"path": tmp_path / "m"}, "optimizer": {"lr": 0.5}}
    of_file, of_dict = prepared(file).config, prepared(tree).config
    of_keywords = prepared({"model.path": tmp_path / "m"}, steps=7, schedule="areal", **{"optimizer.lr": 0.5})
    assert of_file == of_dict == of_keywords.config
    assert prepared(of_file).config == of_file


def test_rows_replace_a_task_of_another_kind_and_keep_what_a_task_of_files_says() -> None:
    gym = MODEL | {"task": {"kind": "gym", "name": "gcd", "template": "{question}?"}}
    assert prepared(gym).config.task.template == "{prompt}"
    file = MODEL | {"task": {"kind": "file", "path": "x.jsonl", "template": "{prompt}?"}}
    assert prepared(file).config.task.template == "{prompt}?"
    assert prepared(gym, task={"template": "{prompt}!"}).config.task.template == "{prompt}!"


def test_rows_without_an_answer_are_a_task_without_one() -> None:
    assert prepared(reward=lambda completion: 1.0, rows=[{"prompt": "p"}]).config.task.answer is None


def test_a_data_set_and_a_frame_are_rows_like_a_list() -> None:
    import datasets
    import pandas

    expected = set(prepared().files)
    rows = datasets.Dataset.from_list(ROWS), pandas.DataFrame(ROWS), tuple(ROWS)
    for same in rows:
        assert set(prepared(rows=same).files) == expected


def test_limits_of_a_reward_stay_when_a_function_takes_its_place() -> None:
    reward = prepared(MODEL | {"reward": {"kind": "math", "timeout_s": 3.0}}).config.reward
    assert (reward.kind, reward.timeout_s) == ("function", 3.0)


def short(completion: str) -> float:
    return -float(len(completion))


def test_a_list_of_rewards_is_their_sum_with_names_and_weights(tmp_path: Path) -> None:
    own = {"name": "own", "weight": 3.0, "reward": {"kind": "function", "path": short, "attempts": 2}}
    given = ["exact", (backwards, 2.0), (short, 0.1), own]
    found = prepared(MODEL | {"reward": {"kind": "math", "timeout_s": 3.0}}, reward=given)
    reward = found.config.reward
    assert reward.kind == "sum" and reward.timeout_s == 3.0
    members = {one.name: (one.weight, one.reward.kind) for one in reward.members}
    assert members == {
        "exact": (1.0, "exact"),
        "backwards": (2.0, "function"),
        "short": (0.1, "function"),
        "own": (3.0, "function"),
    }
    assert reward.members[3].reward.attempts == 2
    tmp_path.chmod(0o700)
    found.place(tmp_path)
    path = reward.members[2].reward.path
    assert load_carried("reward.path", str(tmp_path / path))(completion="abc") == -3.0
    run = recorded(found.config)
    moved = absolute(run, tmp_path)
    assert moved["reward"]["members"][2]["reward"]["path"] == str(tmp_path / path)
    assert relative(moved, tmp_path) == run, "a run's directory may be moved"


def test_keys_of_a_function_stay_when_a_function_takes_its_place() -> None:
    def score(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(one)) for one in completions]

    keys = {"reward.signature": "trl", "reward.attempts": 2}
    reward = prepared(reward=score, **keys).config.reward
    assert (reward.kind, reward.signature, reward.attempts) == ("function", "trl", 2)
    judge = {"kind": "judge", "url": "http://h/v1", "model": "m", "rubric": "r", "attempts": 7}
    assert prepared(MODEL | {"reward": judge}).config.reward.attempts == 1
    with pytest.raises(RewardError, match=r'Set `reward\.signature` to "trl"'):
        prepared(reward=score)
    with pytest.raises(RewardError, match=r'Set `reward\.signature` to "trl"'):
        prepared(reward=["exact", score])


def test_a_closure_comes_back_from_its_file(tmp_path: Path) -> None:
    bonus = 0.5
    found = prepared(reward=lambda completion: bonus)
    tmp_path.chmod(0o700)
    found.place(tmp_path)
    assert load_carried("reward.path", str(tmp_path / found.config.reward.path))(completion="") == 0.5


def test_a_tensor_of_this_machine_is_carried_without_a_word(tmp_path: Path) -> None:
    import torch

    weights = torch.ones(2)
    found = prepared(reward=lambda completion: weights.sum().item())
    tmp_path.chmod(0o700)
    found.place(tmp_path)
    assert load_carried("reward.path", str(tmp_path / found.config.reward.path))(completion="") == 2.0


def test_half_a_character_is_carried_to_where_its_row_is_skipped(tmp_path: Path) -> None:
    row = {"prompt": "stone\ud800>", "answer": "é"}
    (file,) = [data for name, data in prepared(rows=[row]).files.items() if name.endswith(".jsonl")]
    (tmp_path / "rows.jsonl").write_bytes(file)
    assert open_rows(str(tmp_path / "rows.jsonl"))[0] == row


def test_numbers_of_numpy_are_numbers() -> None:
    """Seeds of `np.arange`, rates in float32, a version out of a frame of metrics."""
    keys = {"steps": np.int64(3), "optimizer": {"lr": np.float32(0.5)}, "rollout": {"exact": np.bool_(True)}}
    config = prepared(**keys, sampling={"stop_token_ids": np.array([1, 2])}).config
    assert (config.steps, config.optimizer.lr, config.rollout.exact) == (3, 0.5, True)
    assert config.sampling.stop_token_ids == (1, 2)
    assert json.loads(_request("export", {"version": np.int64(3)})) == {"work": "export", "version": 3}


def test_a_version_out_of_a_frame_is_that_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = millrace.Run(write_group_run(tmp_path / "run", steps=2).path)
    version = run.metrics().frame()["version"].max()
    assert run.trajectories(version=version) == run.trajectories(version=2) != []
    monkeypatch.setattr("millrace.api.run.ask", lambda _, arguments: arguments["version"])
    with pytest.raises(ConfigError, match=r"`version` \('models/x'\) is no whole number"):
        run.export("models/x")  # type: ignore[arg-type]


@pytest.mark.parametrize("harm", ["other bytes", "others may write", "elsewhere"])
def test_a_carried_function_is_refused_where_it_is_not_what_the_run_wrote(tmp_path: Path, harm: str) -> None:
    found = prepared()
    found.place(tmp_path)
    file = tmp_path / found.config.reward.path
    if harm == "other bytes":
        file.write_bytes(file.read_bytes() + b"x")
    elif harm == "others may write":
        file.parent.chmod(0o777)
    else:
        file = file.rename(tmp_path / file.name)
    with pytest.raises(ConfigError, match=r"digest differs|may write it|outside of a run"):
        load_carried("reward.path", str(file))


def test_a_configuration_file_cannot_name_a_pickle(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[reward]\nkind = "function"\npath = "carried/evil.pickle"\n')
    with pytest.raises(ConfigError, match="is a pickle"):
        prepared(file, reward=None)


def with_file(path: str) -> Any:
    opened = open(path)  # noqa: SIM115
    return lambda completion: float(opened.closed)


def with_lock(_: str) -> Any:
    lock = threading.Lock()
    return lambda completion: float(lock.locked())


def with_tensor(_: str) -> Any:
    import torch

    far = torch.empty(1, device="meta")
    return lambda completion: float(far)


@pytest.mark.parametrize(
    ("make", "variable", "what"),
    [
        (with_file, "opened", "an open file"),
        (with_lock, "lock", "a lock"),
        (with_tensor, "far", "a tensor on meta"),
    ],
)
def test_what_cannot_be_carried_is_named(make: Any, variable: str, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"`{variable}` is {what}"):
        prepared(reward=make(__file__))


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"reward": 3}, ConfigError, r"`reward` \(3\) must be a function"),
        ({"reward": [3]}, ConfigError, r"`reward.members\[0\]"),
        ({"reward": [lambda completion: 0.0]}, ConfigError, r"`reward.members\[0\].name`.*<lambda>"),
        ({"reward": [backwards, backwards]}, ConfigError, r"\(backwards\): the name is taken"),
        ({"schedule": 3}, ConfigError, r"`schedule` \(3\) must be a function of the configuration"),
        ({"algorithm": print}, ConfigError, "must be a millrace.algorithms.Algorithm"),
        ({"rows": [{"question": "?"}]}, DataError, r"no row has the column 'prompt' .*\['question'\]"),
        ({"rows": []}, DataError, "`rows` is empty"),
        ({"rows": {"train": ROWS}}, DataError, "choose a split: train"),
        ({"rows": ["p"]}, DataError, "row 0 of `rows` is a str"),
        ({"rows": [{"prompt": "p", "x": object()}]}, DataError, "row 0, column 'x': a object"),
        ({"rewrd": 1}, ConfigError, "unknown keyword `rewrd`.\n  Did you mean `reward`?"),
        ({"stepps": 1}, ConfigError, "unknown keyword `stepps`.\n  Did you mean `steps`?"),
        (
            {"optimizer": {"lrr": 1}},
            ConfigError,
            "unknown key `optimizer.lrr`.\n  Did you mean `optimizer.lr`",
        ),
        ({"reward": lambda completion, level: 0.0}, RewardError, "needs `level`, which nothing provides"),
        ({"config": 3}, ConfigError, "must be a path, a dict or a millrace.Config"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(given: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        prepared(**given)


def test_api_and_command_line_say_the_same_of_a_bad_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 0\n[model]\npath = "m"\n[task]\nkind = "gim"\nname = "gcd"\n[rewad]\nkind = "gym"\n'
    )
    assert app.run(["train", str(file)]) == 2
    stderr = capsys.readouterr().err
    with pytest.raises(ConfigError) as raised:
        millrace.train(file)
    assert stderr == f"ConfigError: {raised.value}\n"


def test_every_public_name_is_there_and_torch_is_not() -> None:
    import subprocess
    import sys

    program = (
        "import sys, millrace\n"
        "assert not {'torch', 'pandas', 'pydantic'} & set(sys.modules), 'import millrace is not light'\n"
        "assert all(hasattr(millrace, name) for name in millrace.__all__)\n"
        "assert not {'torch', 'pandas'} & set(sys.modules), 'a public name is not light'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
