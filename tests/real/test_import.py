"""A GGUF file becomes a directory with the same weights, tokens and ends, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from tests.real.gguf_files import small_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.cli.app import run
from millrace.core.errors import DataError
from millrace.trainer.files.gguf import FAMILIES, import_gguf


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_of_a_file_has_the_weights_that_went_into_it(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    found = import_gguf(write_gguf(tmp_path / "small.gguf", model), tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {name: tensor.tolist() for name, tensor in read.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
    ids = torch.arange(5, 60)[None]
    with torch.no_grad():
        assert torch.equal(read(ids).logits, model(ids).logits)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["model_type"] == family
    note = (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0" in note and "sha256" in note and found.license == "apache-2.0"


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    model = small_model("qwen2")
    import_gguf(write_gguf(tmp_path / "small.gguf", model, left_out="output.weight"), tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert torch.equal(read.lm_head.weight, model.model.embed_tokens.weight)


def test_quantised_weights_are_the_numbers_that_the_file_stands_for(tmp_path: Path) -> None:
    model = small_model("qwen3")
    file = write_gguf(tmp_path / "small.gguf", model, quantization=GGMLQuantizationType.Q8_0)
    import_gguf(file, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(read[name], tensor, atol=tensor.abs().max().item() / 127), name
    assert "Q8_0 (16)" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "the  123", ["the", "Ġ", "Ġ1", "2", "3"]),
        ("smollm", "the  123", ["the", "ĠĠ", "1", "2", "3"]),
        ("llama-bpe", "the  123", ["the", "Ġ", "Ġ", "123"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("qwen2", "the  123", ["the", "Ġ", "Ġ", "1", "2", "3"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    import_gguf(write_gguf(tmp_path / "small.gguf", small_model("llama"), pre=pre), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize(text) == pieces


@pytest.mark.parametrize(
    ("eos", "template", "ends"),
    [
        ("<|endoftext|>", True, {0, 2}),
        ("<|im_end|>", True, {2}),
        ("<|endoftext|>", False, {0}),
    ],
)
def test_every_token_that_ends_a_turn_is_an_end(
    tmp_path: Path, eos: str, template: bool, ends: set[int]
) -> None:
    options: dict[str, Any] = {} if template else {"template": None}
    import_gguf(
        write_gguf(tmp_path / "small.gguf", small_model("llama"), eos=eos, **options), tmp_path / "out"
    )
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert set(written["eos_token_id"]) == ends


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pre": "tekken"}, "'gpt2', cut as 'tekken'"),
        ({"kind": "bert"}, "of the kind 'bert'"),
        ({"kind": "llama"}, "of the kind 'llama'"),
        ({"pre": None}, "cut as None"),
        (
            {"more": {"llama.rope.scaling.factor": 8.0, "llama.rope.scaling.type": "linear"}},
            "rope.scaling.factor",
        ),
        ({"more": {"llama.attention.scale": 0.5}}, "attention.scale, which would be lost"),
        ({"more_tensors": ("rope_freqs.weight",)}, r"unexpected: rope_freqs.weight"),
        ({"left_out": "blk.1.ffn_up.weight"}, r"missing: model.layers.1.mlp.up_proj.weight"),
    ],
    ids=[
        "cuts",
        "kind of tokenizer",
        "sentence pieces",
        "no cuts",
        "positions",
        "a key",
        "a tensor",
        "no tensor",
    ],
)
def test_what_is_not_known_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    file = write_gguf(tmp_path / "small.gguf", small_model("llama"), **options)
    with pytest.raises(DataError, match=says):
        import_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_another_family_and_another_kind_of_file_are_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(DataError, match=r"family 'mamba'\. Known are llama, qwen2, qwen3"):
        import_gguf(tmp_path / "other.gguf", tmp_path / "out")
    (tmp_path / "no.gguf").write_bytes(b"PK\3\4" * 100)
    with pytest.raises(DataError, match="it is no GGUF file"):
        import_gguf(tmp_path / "no.gguf", tmp_path / "out")


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "small.gguf", small_model("llama"))
    assert run(["import", str(file), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "llama, 0.1 million parameters, apache-2.0" in said
    assert "ends of a turn: <|endoftext|> <|im_end|>" in said and "answer: " in said
    assert run(["import", str(tmp_path / "none.gguf"), str(tmp_path / "out")]) == 1
    assert "there is no file" in capsys.readouterr().err
