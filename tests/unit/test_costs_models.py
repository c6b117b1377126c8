"""Parameters and KV bytes against what the models' cards say."""

from __future__ import annotations

import json

import pytest

from millrace.core.errors import ConfigError, DataError
from millrace_sim.costs.models import MODELS, from_hf_config, model

KIB = 1024


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [
        ("Qwen2.5-1.5B", 1.54, 28),
        ("Qwen2.5-7B", 7.61, 56),
        ("Qwen2.5-32B", 32.5, 256),
        ("Qwen2.5-72B", 72.7, 320),
        ("Llama-3.1-8B", 8.03, 128),
        ("Llama-3.1-70B", 70.6, 320),
        ("Llama-3.1-405B", 405.9, 504),
        ("Qwen3-30B-A3B", 30.5, 96),
    ],
)
def test_a_model_has_the_size_that_its_card_states(name, billions, kv_kib):
    shape = model(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.kv_token_bytes() == kv_kib * KIB


def test_a_token_of_a_mixture_is_multiplied_with_few_of_its_experts():
    assert model("Qwen3-30B-A3B").active_parameters / 1e9 == pytest.approx(3.3, rel=0.1)


def test_a_large_batch_reads_every_expert_and_a_single_token_only_its_own():
    mixture = MODELS["Qwen3-30B-A3B"]
    assert mixture.read_bytes(4096) == pytest.approx(mixture.weights_bytes(), rel=1e-3)
    assert mixture.read_bytes(1) < 0.15 * mixture.weights_bytes()
    dense = MODELS["Qwen2.5-7B"]
    assert dense.read_bytes(1) == dense.weights_bytes()


def test_a_config_without_a_needed_key_and_an_unknown_name_are_refused():
    with pytest.raises(DataError, match="num_hidden_layers"):
        from_hf_config({"hidden_size": 64})
    with pytest.raises(ConfigError, match=r"Qwen2\.5-7B"):
        model("Qwen-7B")


def test_a_directory_stands_for_the_model_in_it(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**sizes, "vocab_size": 100}))
    assert model(str(tmp_path)).layers == 2
    config.write_text("{")
    with pytest.raises(DataError, match=f"read {config}"):
        model(str(tmp_path))
