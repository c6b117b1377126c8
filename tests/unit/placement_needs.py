"""What the workers of a model of 500 M parameters need, for tests of placements."""

from __future__ import annotations

from dataclasses import replace

from millrace.placement.memory.activation_memory import ActivationMemory
from millrace.placement.memory.needs import MemoryNeed, Needs

GB = 1_000_000_000
ON_GPU = Needs(
    num_parameters=500_000_000,
    weights_bytes=GB,
    kv_token_bytes=12_000,
    trainer=MemoryNeed(8 * GB, GB),
    replica=MemoryNeed(5 * GB, 2 * GB),
    checkpoint_bytes=6 * GB,
    activation_memory=ActivationMemory(),
)
ON_CPU = replace(ON_GPU, trainer=MemoryNeed(0, 9 * GB), replica=MemoryNeed(0, 7 * GB))
