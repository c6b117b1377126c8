"""Hugging Face directories that no process needed the whole model to write."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from trainer_doubles import make_trainer, save_checkpoint, tiny_model
from transformers import AutoModelForCausalLM

from millrace.config.tables.task import FileTaskSection
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import DataError
from millrace.tasks.chat import render
from millrace.trainer.files.companion_files import read_tokenizer, write_tokenizer
from millrace.trainer.files.export import export_checkpoint, save_model
from millrace.trainer.model import named_weights


def exported(model, directory, dtype):
    directory.mkdir(exist_ok=True)
    save_model(model, {"tokenizer.json": b"{}"}, directory, dtype)
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto")


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_loads_the_very_weights(family, dtype, tmp_path):
    model = tiny_model(family)
    loaded = exported(model, tmp_path, dtype)
    assert loaded.dtype == dtype
    due = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    assert loaded.state_dict().keys() == due.keys()
    assert all(torch.equal(weight, due[name]) for name, weight in loaded.state_dict().items())
    assert (tmp_path / "tokenizer.json").read_bytes() == b"{}"


def test_named_chat_templates_are_kept_and_chosen(tmp_path):
    source, written = tmp_path / "source", tmp_path / "written"
    make_character_tokenizer(source, "ab")
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = {"default": "d{{ messages[0].content }}", "tool_use": "t", "rag": "r"}
    tokenizer.save_pretrained(source)
    written.mkdir()
    write_tokenizer(read_tokenizer(source), written)
    assert load_tokenizer(written).chat_template == tokenizer.chat_template
    assert (written / "additional_chat_templates/tool_use.jinja").read_text() == "t"
    task = FileTaskSection(path="x.jsonl", tools="tools")
    row = {"prompt": [{"role": "user", "content": "b"}]}
    assert render(task, load_tokenizer(written), row, row["prompt"], "row") == "db"
    named = task.model_copy(update={"chat_arguments": {"chat_template": "rag"}})
    with pytest.raises(DataError, match="leaves out message 1"):
        render(named, load_tokenizer(written), row, row["prompt"], "row")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_tensors_are_those_that_transformers_itself_writes(family, tmp_path):
    model = tiny_model(family)
    exported(model, tmp_path / "ours", torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / whose / "model.safetensors") for whose in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_large_model_has_several_files_and_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr("millrace.trainer.files.checkpoint_manifest.FILE_BYTES_MAX", 20_000)
    model = tiny_model("qwen3_moe")
    loaded = exported(model, tmp_path, torch.float32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    largest = max(weight.nbytes for weight in named_weights(model).values())
    for file in tmp_path.glob("model-*.safetensors"):
        assert file.stat().st_size < max(20_000, largest) + 10_000
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_a_checkpoint_is_exported_without_a_model(tmp_path):
    tiny_model().save_pretrained(tmp_path / "start")
    trainer = make_trainer(model=tiny_model(seed=3))
    checkpoint = save_checkpoint(trainer, tmp_path)
    export_checkpoint(checkpoint, tmp_path / "out", model_path=str(tmp_path / "start"), dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert loaded["lm_head.weight"].dtype == torch.bfloat16
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(loaded[name], weight.bfloat16())


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "start")
    checkpoint = save_checkpoint(make_trainer(), tmp_path)
    with pytest.raises(DataError, match="of another model"):
        export_checkpoint(checkpoint, tmp_path / "out", model_path=str(tmp_path / "start"), dtype="bfloat16")
    assert not (tmp_path / "out").exists()
