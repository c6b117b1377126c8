from __future__ import annotations

import pytest
import torch

from millrace.devices.device import torch_device
from millrace.devices.inventory import read_host

pytestmark = pytest.mark.gpu


def test_the_gpu_is_found_without_torch_and_with_it(gpu):
    (first, *_) = read_host().gpus
    assert first.name == torch.cuda.get_device_name(gpu)
    assert abs(first.memory_bytes / torch.cuda.get_device_properties(gpu).total_memory - 1) < 0.1
    assert torch_device("auto").type == torch_device("cuda").type == "cuda"
