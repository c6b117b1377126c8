"""FlashAttention 3 is taken where it is, and left where it fails or differs. Its package is a double here."""

from __future__ import annotations

import pytest
import torch
from torch.nn import attention

from millrace.trainer.kernels import on_gpu

GPU = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper with the package; torch's register, and what attention gives before and after."""
    state = {"active": None, "numbers": [torch.zeros(3), torch.zeros(3)]}
    monkeypatch.setattr(on_gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(on_gpu, "_example", lambda device: state["numbers"].pop(0))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", lambda name: state.update(active=name))
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: state["active"])
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: state.update(active=None))
    on_gpu.activate.cache_clear()
    yield state
    on_gpu.activate.cache_clear()


def test_it_is_taken_where_it_agrees(hopper, caplog):
    caplog.set_level("INFO")
    assert on_gpu.activate(GPU) == "FlashAttention 3" and hopper["active"] == "FA3"
    assert "FlashAttention 3" in caplog.text


def test_it_is_left_where_it_differs(hopper, caplog):
    hopper["numbers"][1] = torch.ones(3)
    assert on_gpu.activate(GPU) == on_gpu.TORCHS and hopper["active"] is None
    assert "off by 1" in caplog.text


def test_it_is_left_where_torch_cannot_register_it(hopper, monkeypatch, caplog):
    def refuse(name):
        raise RuntimeError("does not expose FA3 kernels")

    monkeypatch.setattr(attention, "activate_flash_attention_impl", refuse)
    assert on_gpu.activate(GPU) == on_gpu.TORCHS
    assert "does not expose FA3 kernels" in caplog.text


@pytest.mark.parametrize(("capability", "package"), [((8, 0), "there"), ((10, 0), "there"), ((9, 0), None)])
def test_it_is_not_asked_for_on_another_gpu_or_without_its_package(hopper, capability, package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(on_gpu, "find_spec", lambda name: package)
    assert on_gpu.activate(GPU) == on_gpu.TORCHS and len(hopper["numbers"]) == 2


def test_torch_has_the_register_that_it_is_asked_through():
    assert "FA3" in attention.list_flash_attention_impls()
