"""Gradients of embeddings and output projections, tied and not, in the order of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.long import covering
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from millrace.trainer.kernels import on_cpu, row_threads
from millrace.trainer.kernels.row_threads import RowThreads
from millrace.trainer.row_logprobs import token_logprobs

ROWS = [[1, 2, 3, 2, 9], [2, 2, 2], [4, 5, 0, 0], [0], [7, 8, 9]]
SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda tied: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)),
    "gemma": lambda tied: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, tie_word_embeddings=tied)),
}


def made(family: str, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family](tied).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def gradients(model: PreTrainedModel, threads: int) -> dict[str, torch.Tensor]:
    def work(row: list[int]) -> None:
        hidden = model.base_model(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0]
        weight = model.get_output_embeddings().weight
        token_logprobs(hidden, weight, torch.tensor(row), temperature=1.0)[0].sum().backward()

    RowThreads(8, threads, in_turn=True).run(work, ROWS, list(model.parameters()))
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("family", "tied", "threads"), covering(FAMILIES, [True, False], [1, 3]))
def test_gradients_are_those_of_torch(family: str, tied: bool, threads: int) -> None:
    expected = gradients(made(family, tied), 1)
    model = made(family, tied)
    on_cpu.install_lookup(model)
    found = gradients(model, threads)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_threads_do_not_change_a_bit(tied: bool) -> None:
    found = []
    for threads in (1, 4, 4):
        model = made("llama", tied)
        on_cpu.install_lookup(model)
        found.append(gradients(model, threads))
    assert all(torch.equal(grad, found[0][name]) for other in found[1:] for name, grad in other.items())


def test_no_gradient_of_the_whole_vocabulary_is_made_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama", tied=True)
    on_cpu.install_lookup(model)
    sums = {parameter.grad.data_ptr() for parameter in model.parameters()}
    large = []

    def zeros(*shape: Any, **options: Any) -> torch.Tensor:
        made = torch.empty(*shape, **options).zero_()
        if made.numel():
            large.append(made.shape)
        return made

    monkeypatch.setattr(torch, "zeros", zeros)
    gradients(model, 2)
    assert not large
    assert {parameter.grad.data_ptr() for parameter in model.parameters()} == sums


def test_without_rows_or_without_a_sum_the_gradient_is_autograds() -> None:
    model = made("llama", tied=True)
    on_cpu.install_lookup(model)
    weight = model.get_input_embeddings().weight
    assert row_threads.turns_of(weight) is None
    model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
    assert weight.grad is not None and weight.grad.any()
