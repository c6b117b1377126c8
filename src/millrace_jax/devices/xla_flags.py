"""Flags of XLA on TPUs, set before JAX is imported: the few that published recipes for v5e and v5p agree on.

They let gathers of weights, which `trainer.shard` needs in every layer, run beside matrix products. Left out:
flags that only one recipe has, whose value depends on the model (the limit of VMEM), or that are about
several slices (all-reduces through the data-centre network). No flag was tried on a TPU by us.

Sources, repository AI-Hypercomputer/maxtext: `benchmarks/xla_flags_library.py` at 48445cf (the group
CF_FOR_ALL_GATHER; what each is for), its use for v5e in `benchmarks/maxtext_v5e_model_configs.py` at 00f6981
and `src/MaxText/configs/v5e/llama2_7b.sh` at 56fc8af, for v5p in `benchmarks/maxtext_v5p_model_configs.py` at
0469c1a.
"""

from __future__ import annotations

import os
from typing import NamedTuple

VARIABLE = "LIBTPU_INIT_ARGS"


class Flag(NamedTuple):
    name: str
    value: str
    reason: str


TPU_FLAGS = (
    Flag("xla_enable_async_all_gather", "true", "a gather starts early, and its end is waited for late"),
    Flag("xla_tpu_enable_async_collective_fusion", "true", "collectives are fused with products beside them"),
    Flag("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", "gathers too"),
    Flag(
        "xla_tpu_enable_async_collective_fusion_multiple_steps", "true", "one gather spans several products"
    ),
    Flag("xla_tpu_overlap_compute_collective_tc", "true", "the tensor core computes meanwhile"),
)


def set_tpu_flags() -> None:
    """Add `TPU_FLAGS` to the environment. JAX must not be imported yet.

    A flag that the user has set keeps its value. With the variable set and empty, no flag is added."""
    given = os.environ.get(VARIABLE)
    if given is not None and not given.strip():
        return
    words = (given or "").split()
    named = {word.lstrip("-").partition("=")[0] for word in words}
    ours = [f"--{flag.name}={flag.value}" for flag in TPU_FLAGS if flag.name not in named]
    os.environ[VARIABLE] = " ".join([*words, *ours])
