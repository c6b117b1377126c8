"""The gated product of an MLP: the numbers of transformers, and two kept tensors where autograd has four."""

from __future__ import annotations

import pytest
import torch
from tests.long import covering
from trainer_doubles import tiny_model
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from millrace.placement.memory import activation_memory
from millrace.trainer.kernels import on_cpu
from millrace.trainer.model import install_kernels
from millrace.trainer.ranks.mesh import ALONE

SIZES = {"hidden_size": 32, "intermediate_size": 96}
KINDS = {
    "llama": lambda: LlamaMLP(LlamaConfig(**SIZES)),
    "biased": lambda: LlamaMLP(LlamaConfig(**SIZES, mlp_bias=True)),
    "gemma": lambda: Gemma3MLP(Gemma3TextConfig(**SIZES)),
}
Tensor = torch.Tensor


def pair(kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The MLP of transformers, and the same one with our product."""
    theirs, ours = KINDS[kind](), KINDS[kind]()
    ours.load_state_dict(theirs.state_dict())
    on_cpu.install_linear(ours)
    on_cpu.install_gate(ours)
    return theirs, ours


def results(mlp: torch.nn.Module, *, narrow: bool, kept: list[Tensor]) -> list[Tensor]:
    """The output and all gradients. `kept`: what the forward pass keeps."""
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow, cache_enabled=False),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = mlp(x)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, *mlp.parameters()], slope)]


@pytest.mark.parametrize(("kind", "narrow", "recomputed"), covering(KINDS, [False, True], [False, True]))
def test_outputs_and_gradients_are_those_of_transformers(kind: str, narrow: bool, recomputed: bool) -> None:
    theirs, ours = pair(kind)
    if recomputed:
        plain = ours.forward
        ours.forward = lambda x: torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
    found, expected = (results(mlp, narrow=narrow, kept=[]) for mlp in (ours, theirs))
    rounding = 2.0**-6 if narrow else 2.0**-18
    for own, of_torch in zip(found, expected, strict=True):
        assert (own - of_torch).abs().max() <= rounding * of_torch.abs().max()


def test_a_frozen_down_projection_passes_its_gradient_on() -> None:
    theirs, ours = pair("llama")
    grads = []
    for mlp in (theirs, ours):
        mlp.get_submodule("down_proj").requires_grad_(False)
        mlp(torch.ones(1, 3, 32)).sum().backward()
        grads.append(mlp.get_parameter("up_proj.weight").grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("narrow", [False, True])
def test_two_tensors_of_the_width_of_the_mlp_are_kept(narrow: bool) -> None:
    def wide(mlp: torch.nn.Module) -> int:
        kept: list[Tensor] = []
        results(mlp, narrow=narrow, kept=kept)
        return len({x.untyped_storage().data_ptr() for x in kept if x.numel() == 2 * 7 * 96})

    theirs, ours = pair("llama")
    assert wide(ours) == 2 < wide(theirs)


@pytest.mark.parametrize("sparing", [False, True])
def test_only_a_large_model_spares_memory_in_more_time(
    sparing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    monkeypatch.setattr(activation_memory, "SPARING_MIN", model.num_parameters() + (not sparing))
    install_kernels(model, torch.device("cpu"), ALONE)
    assert ["forward" in vars(layer.mlp) for layer in model.model.layers] == [sparing] * len(
        model.model.layers
    )
