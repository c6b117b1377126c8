"""The text part of a model of images is the model that the whole one is for text."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_doubles import SIZE, save_tiny_model
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    SiglipVisionConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from millrace.cli.app import run
from millrace.core.errors import DataError
from millrace.trainer.files.rewritten import write_text_part
from millrace.trainer.model import load_model

SIGHT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 28, "patch_size": 14}  # fmt: skip
TOKENS = {"image_token_index": 60}


def gemma3():
    text = Gemma3TextConfig(**SIZE, head_dim=16, sliding_window=6, sliding_window_pattern=2)
    config = Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(**SIGHT),
        mm_tokens_per_image=4,
        eos_token_id=[1, 9],
        **TOKENS,
    )
    return Gemma3ForConditionalGeneration(config)


def mistral3():
    text = MistralConfig(**SIZE, head_dim=16, sliding_window=None)
    config = Mistral3Config(vision_config=PixtralVisionConfig(**SIGHT), text_config=text, **TOKENS)
    return Mistral3ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [gemma3, mistral3])
@pytest.mark.parametrize("names", ["as saved now", "as the hub has them"])
def test_it_computes_what_the_whole_model_computes_for_text(make, names, tmp_path):
    torch.manual_seed(0)
    whole = make().eval()
    whole.save_pretrained(tmp_path / "whole")
    if names == "as the hub has them":
        rename(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "whole" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    assert run(["text-part", str(tmp_path / "whole"), str(tmp_path / "text")]) == 0
    tokens = torch.tensor([[5, 8, 13, 21, 34, 55, 2, 3, 4]])
    load_model(tmp_path / "text", torch.device("cpu"))
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    assert type(text).__name__.endswith("ForCausalLM")
    assert (text(tokens).logits - whole(input_ids=tokens).logits).abs().max() < 1e-5
    assert json.loads((tmp_path / "text" / "generation_config.json").read_text()) == {"eos_token_id": [1, 9]}


def rename(file):
    tensors = load_file(file)
    ends = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
            "model.": ""}  # fmt: skip
    renamed = {}
    for name, tensor in tensors.items():
        begin = next((begin for begin in ends if name.startswith(begin)), "")
        renamed[ends.get(begin, "") + name.removeprefix(begin)] = tensor
    save_file(renamed, file, metadata={"format": "pt"})


def test_several_files_keep_their_tensors_and_get_an_index(tmp_path):
    torch.manual_seed(0)
    whole = mistral3()
    whole.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    write_text_part(tmp_path / "whole", tmp_path / "text")
    assert len(list((tmp_path / "text").glob("*.safetensors"))) > 1
    model = load_model(tmp_path / "text", torch.device("cpu"))
    weights = dict(whole.named_parameters())
    assert torch.equal(model.model.norm.weight, weights["model.language_model.norm.weight"])


def test_a_model_without_a_text_part_or_of_a_family_that_is_not_trained_is_refused_by_name(tmp_path):
    save_tiny_model(tmp_path / "text only")
    with pytest.raises(DataError, match=r"has no text part.*Use it as it is"):
        write_text_part(tmp_path / "text only", tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": "ministral3"}}))
    with pytest.raises(DataError, match=r"its text part is of the family 'ministral3', which the trainer"):
        write_text_part(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_whole_model_is_refused_with_the_command_that_makes_its_text_part(tmp_path):
    mistral3().save_pretrained(tmp_path)
    with pytest.raises(
        DataError, match=r"'mistral3': it is for images too. `millrace text-part MODEL DIRECTORY`"
    ):
        load_model(tmp_path, torch.device("cpu"))
