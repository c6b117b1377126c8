"""What the engine and the trainer both compute right, and how each refuses the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_models import make_model
from safetensors.torch import load_file, save_file
from trainer_doubles import SIZE, save_tiny_model
from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    Qwen3Config,
    Starcoder2Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from millrace.core.errors import DataError
from millrace.core.supported import JAX_TRAINER, SERVER, TORCH_ENGINE, TRAINER, VLLM, refuse_unsupported
from millrace.core.turns.end_ids import end_ids
from millrace.core.types import Sampling
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.load_engine import load_engine
from millrace.engines.own.mixture import ACTIVATIONS
from millrace.evaluation.generate import generate
from millrace.sft.supervised import sft
from millrace.trainer.model import load_model

CPU = torch.device("cpu")
WINDOW = {**SIZE, "sliding_window": 4, "pad_token_id": 0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}
REFUSED = {
    "mixtral": MixtralConfig(**WINDOW),
    "phi": PhiConfig(**SIZE),
    "phi3, longrope": Phi3Config(**WINDOW, rope_parameters=LONG),
    "phimoe": PhimoeConfig(**WINDOW),
    "starcoder2": Starcoder2Config(**WINDOW),
    "cohere": CohereConfig(**SIZE, logit_scale=0.0625, pad_token_id=0),
    "olmo2": Olmo2Config(**SIZE, pad_token_id=0),
    "llama, dynamic": LlamaConfig(**SIZE, rope_parameters=DYNAMIC),
    "llama, longrope": LlamaConfig(**SIZE, rope_parameters=LONG),
    "qwen3, fp8": Qwen3Config(**SIZE, quantization_config={"quant_method": "fp8"}),
    "gemma3, capped": Gemma3TextConfig(**WINDOW, attn_logit_softcapping=30.0),
    "gemma3, dynamic": Gemma3TextConfig(**WINDOW, rope_parameters={"full_attention": DYNAMIC}),
}
TRAINED = {
    "qwen3, relu": Qwen3Config(**SIZE, hidden_act="relu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_engine_trainer_and_warm_start_refuse_the_same_models(name, tmp_path):
    config = REFUSED[name]
    with pytest.raises(DataError, match="The torch engine cannot run"):
        architecture_of(config)
    config.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="The trainer cannot run"):
        load_model(tmp_path, CPU)
    with pytest.raises(DataError, match="The trainer cannot run"):
        sft(tmp_path, [([1], [2])], out_dir=tmp_path / "out", steps=1, lr=1e-3, batch_tokens=64)


def test_the_table_in_the_documents_says_who_runs_which_family():
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| (yes|no) \| (yes|no) \| (yes|no) \|$", text, re.MULTILINE)
    for column, supported in enumerate((TRAINER, TORCH_ENGINE, VLLM), start=1):
        assert sorted(row[0] for row in rows if row[column] == "yes") == sorted(supported.families)


@pytest.mark.parametrize(
    ("supported", "family", "message"),
    [
        (VLLM, "gemma2", r"A replica with vLLM cannot run .*'gemma2': on a CPU its log-probs are 3e-4"),
        (VLLM, "smollm3", r"A replica with vLLM cannot run .*'smollm3': vLLM has no code for it"),
        (JAX_TRAINER, "qwen3_moe", r"The trainer in JAX cannot run .*'qwen3_moe': its layers have experts"),
        (SERVER, "gpt_oss", r"A server cannot run .*'gpt_oss': vLLM's own reload"),
    ],
)
def test_what_an_engine_cannot_serve_is_refused_with_the_engines_reason(supported, family, message):
    with pytest.raises(DataError, match=message):
        refuse_unsupported(SimpleNamespace(model_type=family), supported)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss", "mistral", "phi3", "qwen3_moe"])
def test_a_warm_started_model_is_a_directory_that_transformers_and_the_torch_engine_read_alike(
    name, tmp_path
):
    save_tiny_model(tmp_path / "model", name)
    sft(tmp_path / "model", [([1], [2, 3])], out_dir=tmp_path / "out", steps=2, lr=1e-3, batch_tokens=64)
    engine = load_engine(str(tmp_path / "out"), device="cpu", slots=2, max_sequence_tokens=32)
    [[ours]] = generate(engine, [[5, 6]], Sampling(max_tokens=20, temperature=0, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    logits = model(torch.tensor([[5, 6, *ours.tokens]])).logits[0, 1:-1]
    assert logits.argmax(-1).tolist() == ours.tokens


def test_the_torch_engine_computes_every_activation_that_it_says():
    assert sorted(ACTIVATIONS) == sorted(TORCH_ENGINE.activations)


@pytest.mark.parametrize("name", TRAINED)
def test_what_only_the_trainer_computes_is_refused_by_the_torch_engine_alone(name, tmp_path):
    AutoModelForCausalLM.from_config(TRAINED[name]).save_pretrained(tmp_path)
    load_model(tmp_path, CPU)
    with pytest.raises(DataError, match="The torch engine cannot run"):
        load_engine(str(tmp_path), device="cpu")


def test_a_tied_configuration_whose_file_holds_another_head_is_refused(tmp_path):
    make_model("qwen3 tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    load_engine(str(tmp_path), device="cpu")
    load_model(tmp_path, CPU)
    save_file({**tensors, "lm_head.weight": embedding + 1.0}, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"ties `lm_head.weight` to the embedding, but the file holds"):
        load_engine(str(tmp_path), device="cpu")
    with pytest.raises(DataError, match=r"that should be one and differ: lm_head.weight"):
        load_model(tmp_path, CPU)


def rewritten(directory, name, **changes):
    path = directory / name
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings |= changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value != "absent"}))


def test_a_completion_ends_where_a_file_says_and_never_by_a_default_of_transformers(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZE)).save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json"):
        rewritten(tmp_path, name, eos_token_id="absent")
    with pytest.raises(DataError, match=r"no file says which token ends a completion.*`eos_token_id`"):
        load_engine(str(tmp_path), device="cpu")
    rewritten(tmp_path, "generation_config.json", eos_token_id=[7, 9])
    assert end_ids(str(tmp_path), None) == {7, 9}
    rewritten(tmp_path, "generation_config.json", eos_token_id=None)
    assert end_ids(str(tmp_path), None) == set()


def test_a_warm_start_refuses_a_token_that_the_model_does_not_embed(tmp_path):
    save_tiny_model(tmp_path / "model")
    for token in (64, -1, 10**6):
        with pytest.raises(DataError, match=f"example 1 has the token id {token}, and the model embeds ids"):
            sft(
                tmp_path / "model",
                [([1], [2]), ([3], [4, token])],
                out_dir=tmp_path / "out",
                steps=1,
                lr=1e-3,
                batch_tokens=64,
            )


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/model.safetensors", "sub/w.safetensors", "a.bin"]
)
def test_weights_outside_of_the_model_directory_are_no_part_of_it(tmp_path: Path, name: str) -> None:
    """They are in no digest of the run's content."""
    from millrace.placement.model_directory import tensor_shapes

    model = tmp_path / "model"
    save_tiny_model(model)
    tensors = load_file(model / "model.safetensors")
    (tmp_path / "other").mkdir()
    (model / "sub").mkdir()
    (model / "model.safetensors").rename(tmp_path / "other" / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (
        lambda: load_model(model, CPU),
        lambda: load_engine(str(model)),
        lambda: tensor_shapes(model),
    ):
        with pytest.raises(DataError, match=f"names '{re.escape(name)}'"):
            read()
