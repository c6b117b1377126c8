"""A run goes on with the model and the data that it began with."""

from __future__ import annotations

import pytest

from millrace.config.schema import Config
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.errors import DataError
from millrace.run.content_digests import content_digests, other_sources, refuse_other_content, source_digests


@pytest.fixture
def config(tmp_path):
    model, rows = tmp_path / "start", tmp_path / "rows.jsonl"
    model.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        (model / name).write_text(name)
    rows.write_text('{"prompt": "a"}\n')
    plain = {"steps": 1, "model": {"path": str(model)}, "task": {"kind": "file", "path": str(rows)}}
    return Config.model_validate(plain | {"reward": {"kind": "exact"}})


def test_the_same_files_are_let_through(config):
    refuse_other_content(content_digests(config), content_digests(config))


@pytest.mark.parametrize("name", ["start/model.safetensors", "start/tokenizer.json", "rows.jsonl"])
@pytest.mark.parametrize("change", ["other", "gone"])
def test_a_file_that_changed_is_named_with_both_digests(config, tmp_path, name, change):
    before, path = content_digests(config), tmp_path / name
    if change == "gone" and path.suffix == ".jsonl":
        path.unlink()
        with pytest.raises(DataError, match=r"rows.jsonl cannot be read"):
            content_digests(config)
        return
    path.unlink() if change == "gone" else path.write_text("other")
    after = r"[0-9a-f]{32}" if change == "other" else r"\(not there\)"
    with pytest.raises(DataError, match=rf"path: {path.name}: [0-9a-f]{{32}} -> {after}\n  Put them back"):
        refuse_other_content(before, content_digests(config))


def test_a_new_weights_file_is_named(config, tmp_path):
    before = content_digests(config)
    (tmp_path / "start" / "model-2.safetensors").write_text("more")
    with pytest.raises(DataError, match=r"model-2.safetensors: \(not there\) -> "):
        refuse_other_content(before, content_digests(config))


def test_what_is_not_read_may_change(config, tmp_path):
    before = content_digests(config)
    (tmp_path / "start" / "README.md").write_text("other")
    refuse_other_content(before, content_digests(config))


def test_every_file_of_a_data_set_directory_counts(config, tmp_path):
    directory = tmp_path / "set" / "train"
    directory.mkdir(parents=True)
    (directory / "data.arrow").write_text("rows")
    task = config.task.model_copy(update={"path": str(tmp_path / "set")})
    config = config.model_copy(update={"task": task})
    before = content_digests(config)
    (directory / "data.arrow").write_text("other")
    with pytest.raises(DataError, match=r"task.path: set/train/data.arrow: "):
        refuse_other_content(before, content_digests(config))


def test_another_teacher_is_named(config, tmp_path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "model.safetensors").write_text("wise")
    algorithm = PolicyGradient(teacher=str(teacher))
    config = config.model_copy(update={"algorithm": algorithm})
    before = content_digests(config)
    (teacher / "model.safetensors").write_text("other")
    with pytest.raises(DataError, match=r"algorithm\.teacher: model\.safetensors: [0-9a-f]{32} -> "):
        refuse_other_content(before, content_digests(config))


def test_files_of_functions_may_change_and_are_named(config, tmp_path, monkeypatch):
    (tmp_path / "own_scores").mkdir()
    for name in ("score.py", "rows.py", "own_scores/__init__.py", "own_scores/deep.py"):
        (tmp_path / name).write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = {"kind": "function", "path": f"{tmp_path / 'score.py'}:reward"}
    member = {"name": "deep", "reward": {"kind": "function", "path": "own_scores.deep:reward"}}
    plain = {"steps": 1, "model": {"path": "m"}, "task": {"kind": "function", "path": "rows:rows"}}
    rewards = {"reward.path": reward, "reward.members.deep.reward.path": {"kind": "sum", "members": [member]}}
    for key, of_key in rewards.items():
        made = Config.model_validate(plain | {"reward": of_key})
        about = {"sources": source_digests(made)}
        assert about["sources"].keys() == {key, "task.path"} and not list(other_sources(about, about))
        assert list(other_sources({}, about)) == []  # a run of an older version
        file = tmp_path / ("score.py" if key == "reward.path" else "own_scores/deep.py")
        file.write_text("raise ValueError\n")
        [(named, reason)] = other_sources(about, {"sources": source_digests(made)})
        assert named == key and reason.startswith("its file has changed since the run began (digests ")
    for path in "none.at.all:f", "none.py:f", "own_scores.none:f", "carried/f.pickle", "sys:f":
        one = Config.model_validate(plain | {"reward": {"kind": "function", "path": path}})
        assert source_digests(one).keys() == {"task.path"}
