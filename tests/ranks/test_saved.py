"""Checkpoints and exports of several ranks: the same files as of one process, complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.ranks import saving
from tests.ranks.together import together
from transformers import AutoModelForCausalLM, Qwen3Config

from millrace.trainer.files.checkpoint import load_checkpoint, verified
from millrace.trainer.files.directories import sweep

SHARDED = {"shard": 2}
OTHERS = {2: [{"tensor": 2}], 4: [{"shard": 4}, {"shard": 2, "tensor": 2}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trainer_doubles import save_tiny_model

    uneven = {"vocab_size": 67, "num_attention_heads": 8, "num_key_value_heads": 4}
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **uneven)


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of two ranks after two steps."""
    out = tmp_path_factory.mktemp("saved")
    assert together(2, saving.save_and_go_on, SHARDED, model, out) == [True, True]
    return out / "v00000002"


def digests(checkpoint: Path) -> dict[str, str]:
    """Of weights and optimizer. Generators are those of each rank."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: file["digest"] for name, file in files.items() if not name.startswith("rng")}


def test_steps_after_a_load_are_those_without_one_bit_for_bit(saved: Path) -> None:
    assert verified(saved)[0] == 2  # the rest is in the fixture


@pytest.mark.parametrize("world", OTHERS)
def test_what_other_ranks_load_and_save_again_is_the_same(world: int, model: Path, saved: Path) -> None:
    together(world, saving.load_and_save_again, OTHERS[world], model, saved)
    for number in range(len(OTHERS[world])):
        assert digests(saved.parent / str(number) / saved.name) == digests(saved)


def test_what_one_process_loads_and_saves_again_is_the_same(model: Path, saved: Path, tmp_path: Path) -> None:
    from trainer_doubles import make_trainer, save_checkpoint

    trainer = make_trainer(model=AutoModelForCausalLM.from_pretrained(model))
    load_checkpoint(trainer, saved)
    assert digests(save_checkpoint(trainer, tmp_path)) == digests(saved)


def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1: it died"):
        together(2, saving.die_in_a_save, SHARDED, model, tmp_path)
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]
    assert verified(tmp_path / "v00000001")[0] == 1


@pytest.mark.parametrize("where", ["fill", "describe"])
def test_a_save_that_fails_on_one_rank_fails_on_all(where: str, model: Path, tmp_path: Path) -> None:
    for message in together(2, saving.fail_in_a_save, SHARDED, model, tmp_path, where):
        assert message.startswith("StorageError") and "No space left on device" in message
    assert list(tmp_path.iterdir()) == []


def test_an_export_of_ranks_is_that_of_one_process_and_takes_no_memory(tmp_path: Path) -> None:
    """12 million parameters: a rank has 25 MB of weights, and the files 25 MB."""
    config = Qwen3Config(
        vocab_size=16_384,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    whole = AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path / "model")
    grew = together(2, saving.export, SHARDED, tmp_path / "model", tmp_path)
    assert_exported(tmp_path)
    assert max(grew) < 16_000_000, grew


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_fused_matrices_and_experts_that_ranks_divide_are_exported_whole(tmp_path: Path, family: str) -> None:
    from trainer_doubles import save_tiny_model

    save_tiny_model(tmp_path / "model", family)
    together(2, saving.export, {"tensor": 2}, tmp_path / "model", tmp_path)
    assert_exported(tmp_path)


def assert_exported(directory: Path) -> None:
    found = load_file(directory / "second" / "model.safetensors")
    stored = load_file(directory / "model" / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(found[name].equal(weight.bfloat16()) for name, weight in stored.items())
