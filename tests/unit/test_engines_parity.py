"""The engine computes what Hugging Face computes."""

from __future__ import annotations

import pytest
import torch
from engine_models import CONFIGS, EOS, make_engine, make_model, make_work, prompt_of, run, teacher_forced
from tests.long import few
from transformers import LlamaConfig, PhiConfig

from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.errors import DataError
from millrace.core.turns.end_ids import end_ids
from millrace.core.types import Finish, Sampling
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.load_engine import load_engine
from millrace.evaluation.generate import generate
from millrace.rollout.model_tokens import load_tokenizer, text_decoder

PROMPT_LENGTHS = (1, 2, 17, 64, 90)


@pytest.mark.parametrize("name", few(CONFIGS, 6))
def test_greedy_output_equals_generate(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model, prefill_chunk=24)
    prompts = [prompt_of(i, length) for i, length in enumerate(PROMPT_LENGTHS)]
    ended: list[int] = []
    completions = generate(
        engine, prompts, Sampling(max_tokens=40, temperature=0), n=2, on_end=lambda: ended.append(1)
    )
    assert len(ended) == 2 * len(prompts)
    for prompt, (first, second) in zip(prompts, completions, strict=True):
        tokens = torch.tensor([prompt])
        expected = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=40
        )
        assert first.tokens == second.tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_equal_a_teacher_forced_forward(name: str) -> None:
    model = make_model(name, scale=1.5)
    works = [make_work(i, prompt_of(i, n), Sampling(max_tokens=120)) for i, n in enumerate(PROMPT_LENGTHS)]
    results = run(make_engine(model), works)
    for work in works:
        tokens, logprobs, _ = results[work.trajectory_id]
        expected = teacher_forced(model, work.prompt, tokens).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (torch.tensor(logprobs) - expected).abs().max() < 2e-5


def test_logprobs_are_of_the_truncated_distribution() -> None:
    model = make_model(scale=1.5)
    sampling = Sampling(max_tokens=30, temperature=0.7, top_k=12, top_p=0.9)
    work = make_work(0, prompt_of(0, 20), sampling)
    tokens, logprobs, _ = run(make_engine(model), [work])[0]
    for row, token, logprob in zip(teacher_forced(model, work.prompt, tokens), tokens, logprobs, strict=True):
        probs, ids = (row.double() / 0.7).softmax(-1).sort(descending=True)
        probs, ids = probs[:12] / probs[:12].sum(), ids[:12]
        kept = int((probs.cumsum(0) - probs < 0.9).sum())
        allowed = dict(zip(ids[:kept].tolist(), (probs[:kept] / probs[:kept].sum()).tolist(), strict=True))
        assert token in allowed
        assert abs(torch.tensor(allowed[token]).log().item() - logprob) < 1e-4


@pytest.mark.parametrize("name", ["llama tied", "phi3", "qwen3_moe, a dense layer"])
def test_an_engine_loaded_from_a_directory_serves_it_as_version_0(name: str, tmp_path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    engine = load_engine(str(tmp_path), device="cpu", slots=4, max_sequence_tokens=64)
    sampling = Sampling(max_tokens=20, temperature=0)
    assert engine.version == 0
    assert generate(engine, [[5, 6]], sampling) == generate(make_engine(model), [[5, 6]], sampling)


def test_every_configured_end_of_sequence_id_ends_a_completion(tmp_path) -> None:
    model = make_model("llama tied")
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(tmp_path)
    make_character_tokenizer(tmp_path, "0123456789")
    tokenizer = load_tokenizer(str(tmp_path))
    ends = end_ids(str(tmp_path), tokenizer)
    assert ends == {EOS, 7, 9, tokenizer.eos_token_id}


def test_stop_strings_are_found_in_the_tokenizers_text(tmp_path) -> None:
    model = make_model("llama tied", scale=1.2)
    model.save_pretrained(tmp_path)
    make_character_tokenizer(tmp_path, "".join(map(chr, range(33, 33 + 96))))
    engine = load_engine(str(tmp_path), device="cpu", max_sequence_tokens=64)
    text = text_decoder(load_tokenizer(str(tmp_path)))
    [[free]] = generate(engine, [[5, 6]], Sampling(max_tokens=30))
    stop = text(free.tokens[5:8])
    [[stopped]] = generate(engine, [[5, 6]], Sampling(max_tokens=30, stop=(stop,)))
    assert text(stopped.tokens).endswith(stop) and stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert (free.finish, stopped.finish) == (Finish.LENGTH, Finish.STOP)


def test_a_completion_that_the_longest_sequence_cuts_is_not_complete() -> None:
    engine = make_engine(make_model(), max_sequence_tokens=26)
    [[cut]] = generate(engine, [prompt_of(0, 20)], Sampling(max_tokens=40, ignore_eos=True))
    assert (len(cut.tokens), cut.finish) == (6, Finish.LENGTH)


def test_a_model_file_without_a_tensor_is_an_error_that_names_it(tmp_path) -> None:
    model = make_model("qwen3 untied, no grouping")
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(DataError, match=r"lm_head\.weight"):
        load_engine(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    "file", ["model.safetensors", "model.safetensors.index.json", "generation_config.json", "tokenizer.json"]
)
def test_a_model_directory_with_a_damaged_file_is_refused_by_name(file: str, tmp_path) -> None:
    make_model("llama tied").save_pretrained(tmp_path)
    make_character_tokenizer(tmp_path, "0123456789")
    (tmp_path / file).write_bytes(b"{")
    with pytest.raises(DataError, match=rf"`model.path`.*{tmp_path.name}"):
        load_engine(str(tmp_path), device="cpu")


def test_an_unknown_architecture_is_an_error_that_lists_the_supported_ones() -> None:
    with pytest.raises(DataError, match=r"(?s)'phi'.*llama, mistral, phi3, qwen2, qwen3, qwen3_moe"):
        architecture_of(PhiConfig(num_hidden_layers=1))


def test_rotary_embeddings_that_depend_on_the_length_are_refused() -> None:
    config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(DataError, match="'dynamic'"):
        architecture_of(config)
