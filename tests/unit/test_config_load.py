"""Defaults < files < overrides; what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.config.freeze import config_digest, dump, restore
from millrace.config.load import load, load_as, parse_value
from millrace.config.schema import Config
from millrace.config.tables.schedules import AReaL, Laminar, Millrace, Synchronous
from millrace.config.tables.task import FileTaskSection, FunctionRewardSection
from millrace.core.errors import ConfigError
from millrace.sft.sft_config import SupervisedConfig

BASE = """
steps = 10

[model]
path = "model"

[task]
kind = "gym"
name = "chain_sum"

[reward]
kind = "gym"

[schedule]
kind = "laminar"
staleness_max = 4
"""


def write(directory: Path, text: str, name: str = "run.toml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_a_file_overrides_defaults_and_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, BASE), ["steps=20", "optimizer.lr=1e-3"])
    assert (config.steps, config.optimizer.lr, config.batch.prompts) == (20, 1e-3, 8)


def test_the_command_line_overrides_a_table_key_by_key(tmp_path: Path) -> None:
    config = load(write(tmp_path, BASE), ["task.size=7"])
    assert (config.task.kind, config.task.size) == ("gym", 7)


@pytest.mark.parametrize("kind", ["synchronous", "llamarl", "areal", "laminar", "rlax"])
@pytest.mark.parametrize("key", ["schedule.kind", "schedule"])
def test_one_key_switches_the_preset_whatever_the_file_says_of_the_old_one(
    tmp_path: Path, kind: str, key: str
) -> None:
    assert load(write(tmp_path, BASE), [f"{key}={kind}"]).schedule.kind == kind


def test_fields_of_a_new_kind_may_be_set_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    assert load(path, ["schedule=areal", "schedule.eta=2"]).schedule == AReaL(eta=2)
    assert load(path, ["schedule.eta=2", "schedule=areal"]).schedule == AReaL(eta=2)


def test_naming_the_kind_that_is_there_keeps_its_fields(tmp_path: Path) -> None:
    path = write(tmp_path, BASE.replace("staleness_max = 4", "staleness_max = 2"))
    assert load(path, ["schedule=laminar"]).schedule == Laminar(staleness_max=2)


def test_a_table_without_a_kind_is_of_the_default_kind(tmp_path: Path) -> None:
    path = write(tmp_path, BASE.replace('kind = "laminar"\n', ""))
    assert load(path, ["schedule.staleness_max=1"]).schedule == Millrace(staleness_max=1)
    assert load(path, ["schedule=synchronous"]).schedule == Synchronous()


def test_a_kind_alone_may_stand_for_its_table(tmp_path: Path) -> None:
    text = 'schedule = "areal"\n' + BASE.split("[schedule]")[0]
    assert load(write(tmp_path, text)).schedule == AReaL()


def test_a_whole_table_may_be_set_at_once(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, BASE), ["schedule={kind='areal', eta=2}"])
    assert loaded.schedule == AReaL(eta=2)


def test_an_override_inside_free_options_keeps_the_other_options(tmp_path: Path) -> None:
    path = write(tmp_path, BASE.replace('"chain_sum"', '"chain_sum"\noptions = { a = 1, b = 2 }'))
    assert load(path, ["task.options.b=3"]).task.options == {"a": 1, "b": 3}


def test_none_is_written_as_a_word_where_a_key_admits_it(tmp_path: Path) -> None:
    text = BASE.replace("staleness_max = 4", 'staleness_max = "none"')
    config = load(write(tmp_path, text), ["algorithm.correction=none", "algorithm.scale=none"])
    assert config.schedule.staleness_max is None
    assert config.algorithm.correction is None
    assert config.algorithm.scale == "none"


def test_paths_are_relative_to_the_file_that_writes_them(tmp_path: Path) -> None:
    text = BASE.replace(
        '[task]\nkind = "gym"\nname = "chain_sum"', '[task]\nkind = "file"\npath = "../data/rows.jsonl"'
    ).replace('[reward]\nkind = "gym"', '[reward]\nkind = "function"\npath = "score.py:reward"')
    (tmp_path / "sub").mkdir()
    text += '\n[rollout]\nengine = "vllm"\ndrafts = "eagle"\ndraft_model = "head"\nseeded = false\n'
    config = load(write(tmp_path / "sub", text))
    assert config.rollout.draft_model == str(tmp_path / "sub" / "head")
    assert config.model.path == str(tmp_path / "sub" / "model")
    assert config.task == FileTaskSection(path=str(tmp_path / "data" / "rows.jsonl"))
    assert config.reward == FunctionRewardSection(path=f"{tmp_path}/sub/score.py:reward")


def test_paths_of_the_command_line_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load(write(tmp_path, BASE), ["model.path=m"]).model.path == str(tmp_path / "elsewhere" / "m")


def test_an_import_path_of_a_reward_is_no_file(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    assert load(path, ["reward=function", "reward.path=pkg.mod:f"]).reward.path == "pkg.mod:f"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-6", 1e-6),
        ("true", True),
        ('["a"]', ["a"]),
        ("'5'", "5"),
        ("plain text", "plain text"),
        ("{question}", "{question}"),
        ("1\nb = 2", "1\nb = 2"),
        ("", ""),
    ],
)
def test_an_override_is_a_toml_value_or_else_a_string(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path, BASE.replace("staleness_max", "stalenes_max"))
    assert refusal(path) == (
        "unknown key `schedule.stalenes_max` for kind 'laminar'.\n"
        f"  Did you mean `schedule.staleness_max`?   [{path}:16]"
    )


def test_an_unknown_key_that_exists_elsewhere_is_shown_there(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    assert "Did you mean `rollout.replicas`?" in refusal(path, "replicas=3")
    assert "Did you mean `batch.group_size`?" in refusal(path, "sampling.group_size=3")


def test_a_key_of_another_kind_names_that_kind(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, BASE), "schedule.eta=3")
    assert "`schedule.eta` is a key of kind 'areal', but `schedule.kind` is 'laminar'" in said
    assert "[--set schedule.eta=3]" in said


def test_a_wrong_kind_lists_the_kinds(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, BASE), "schedule=aral")
    assert "`schedule.kind` ('aral') is not known" in said
    assert "Did you mean 'areal'?" in said
    assert "'synchronous', 'llamarl', 'areal', 'laminar', 'millrace', 'rlax'" in said


def test_a_missing_kind_without_a_default_lists_the_kinds(tmp_path: Path) -> None:
    path = write(tmp_path, BASE.replace('[reward]\nkind = "gym"', "[reward]\nworkers = 2"))
    said = refusal(path)
    assert "`reward.kind` is missing" in said
    assert "'gym', 'math', 'exact', 'code', 'json', 'pattern', 'judge', 'function'" in said
    assert f"[{path}:11]" in said


def test_a_missing_key_says_where_it_belongs(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, BASE.replace('path = "model"', "")))
    assert "`model.path` is missing" in said
    assert "under `[model]`" in said


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=many", "`steps` ('many') must be a valid integer"),
        ("steps=0", "`steps` (0) must be greater than or equal to 1"),
        ("steps=1.5", "`steps` (1.5) must be a valid integer"),
        ("rollout.replicas=true", "`rollout.replicas` (True) must be a valid integer"),
        ("optimizer.betas=[0.9]", "`optimizer.betas[1]` is missing"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "`optimizer.betas`"),
        ("optimizer=3", "`optimizer` (3) must be a table"),
        ("optimizer=3", "set one of them: --set optimizer.KEY=VALUE"),
        ("task.options.x={ y = 1 }", "`task.options.x` ({'y': 1}) has a type that the key cannot have"),
        ("model.dtype=float16", "must be 'float32' or 'bfloat16'"),
    ],
)
def test_a_wrong_value_is_refused_with_key_and_value(tmp_path: Path, override: str, expected: str) -> None:
    said = refusal(write(tmp_path, BASE), override)
    assert expected in said
    assert said.endswith(f"[--set {override}]")
    assert said.count("[--set") == 1


def test_a_contradiction_of_two_keys_names_the_lines_of_both(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "[sampling]\nmax_tokens = 64\n[rollout]\nmax_sequence_tokens = 64\n")
    said = refusal(path)
    assert "`sampling.max_tokens` (64) leaves no room" in said
    assert said.endswith(f"[{path}:18, {path}:20]")


def test_a_python_for_replicas_is_refused_where_nodes_have_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    with pytest.raises(ConfigError, match=r"`rollout\.python` .*On Ray every worker runs"):
        load(path, ["runtime=ray", "rollout.python=/opt/vllm/bin/python"])


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, BASE), "steps=0", "sede=1", "schedule=foo")
    assert len(said.split("[--set")) == 4


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=3", ".a=3"])
def test_an_override_without_a_key_and_a_value_is_refused(tmp_path: Path, override: str) -> None:
    assert "must have the form key=value" in refusal(write(tmp_path, BASE), override)


def test_a_key_cannot_be_a_value_and_a_table(tmp_path: Path) -> None:
    assert "both a value" in refusal(write(tmp_path, BASE), "steps=3", "steps.x=4")


def test_a_file_that_is_not_there_or_no_toml_is_refused(tmp_path: Path) -> None:
    assert "there is no configuration file" in refusal(tmp_path / "no.toml")
    assert "this line is no TOML" in refusal(write(tmp_path, "steps = = 3"))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    assert "cannot read" in refusal(tmp_path / "latin.toml")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    path.write_text("\ufeff" + path.read_text())
    assert load(path).steps == load(write(tmp_path, BASE)).steps


def test_a_dumped_configuration_comes_back_equal_with_the_same_digest(tmp_path: Path) -> None:
    config = load(write(tmp_path, BASE), ['sampling.stop=["a"]', "task.options.x=1"])
    again = restore(dump(config), Path("config.json"))
    assert again == config
    assert config_digest(again) == config_digest(config)


def test_any_changed_key_changes_the_digest(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    assert config_digest(load(path)) != config_digest(load(path, ["seed=1"]))


def test_a_broken_dump_is_refused_with_its_origin(tmp_path: Path) -> None:
    tree = dump(load(write(tmp_path, BASE))) | {"steps": 0}
    with pytest.raises(ConfigError, match=r"config\.json: `steps` \(0\)"):
        restore(tree, Path("config.json"))


def test_a_configuration_cannot_be_changed_after_loading(tmp_path: Path) -> None:
    config = load(write(tmp_path, BASE))
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # type: ignore[misc]
    assert isinstance(config, Config)


def test_a_warm_start_has_its_own_schema_and_the_same_rules(tmp_path: Path) -> None:
    text = '[model]\npath = "a"\nout = "b"\n[data]\npath = "d.jsonl"\n'
    config = load_as(SupervisedConfig, write(tmp_path, text), ["lr=0.1"])
    assert config.model.out == str(tmp_path / "b")
    assert config.lr == 0.1
    with pytest.raises(ConfigError, match=r"Did you mean `data\.path`"):
        load_as(SupervisedConfig, write(tmp_path, text), ["data.paht=x"])


@pytest.mark.parametrize(
    ("device", "nearest"),
    [
        ("GPU", "cuda"),
        ("gpu7", "cuda:7"),
        ("0", "cuda:0"),
        ("CUDA:1", "cuda:1"),
        ("cuda0", "cuda:0"),
        ("cpu:0", "cpu"),
        ("CPU", "cpu"),
        ("atuo", "auto"),
        ("banana", ""),
        ("mps", ""),
        ("", ""),
        ("cuda:-1", "cuda"),
    ],
)
def test_an_unknown_device_is_refused_with_the_nearest_one(tmp_path: Path, device: str, nearest: str) -> None:
    message = refusal(write(tmp_path, BASE), f'model.device="{device}"')
    assert f"`model.device` ({device!r})" in message
    assert "`cpu`, `cuda`, `cuda:N` (GPU number N alone, from 0) or `auto`" in message
    assert f'[--set model.device="{device}"]' in message
    assert (f"Did you mean {nearest!r}?" in message) if nearest else "Did you mean" not in message


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:11", "auto"])
def test_a_device_is_one_of_four_words(tmp_path: Path, device: str) -> None:
    assert load(write(tmp_path, BASE), [f"model.device={device}"]).model.device == device


def test_one_gpu_by_its_number_is_of_one_machine(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, BASE), "model.device=cuda:1", "runtime.kind=ray")
    assert "`model.device` ('cuda:1') names a GPU of one machine" in message
