"""GGUF files of small models with known weights, as llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "t h", "th e", "Ġ 1", "1 2", "12 3"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokens() -> list[str]:
    return (
        SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    )


def small_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=len(tokens()), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=0, pad_token_id=0, **changes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # norms and biases are not all alike
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def write_gguf(
    path: Path,
    model: Any,
    *,
    pre: str | None = "smollm",
    kind: str = "gpt2",
    eos: str = "<|endoftext|>",
    template: str | None = TEMPLATE,
    more: dict[str, Any] | None = None,
    more_tensors: tuple[str, ...] = (),
    left_out: str | None = None,
    quantization: GGMLQuantizationType | None = None,
) -> Path:
    config, family = model.config, model.config.model_type
    writer = GGUFWriter(path, family)
    writer.add_name("small")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    names = tokens()
    writer.add_token_list(names)
    normal, control = TokenType.NORMAL, TokenType.CONTROL
    writer.add_token_types([control if name in SPECIAL else normal for name in names])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(names.index(eos))
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    for key, value in (more or {}).items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_string(key, value)
    found = get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = _interleaved(tensor, heads)
        ours = found.get_name(name, try_suffixes=(".weight", ".bias"))
        if ours != left_out:
            _add(writer, ours, tensor, quantization)
    for name in more_tensors:
        _add(writer, name, torch.ones(8), None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours, transformers halves."""
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def _add(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: GGMLQuantizationType | None) -> None:
    data = tensor.numpy()
    if kind is None or data.ndim == 1:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
