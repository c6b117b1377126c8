"""Memory by a model's dimensions alone, on devices that are not here: for the simulator and the planner.

`needs` counts what Millrace keeps, from a model's files. These are the formulas of papers instead, of a
trainer in bf16 on any framework. A number format has the names of `DTYPE_BYTES`.
"""

from __future__ import annotations

from millrace.placement.memory.model_shape import DTYPE_BYTES, kv_bytes

STATE_BYTES = 16
"""Per parameter and sharded: bf16 weight and gradient, float32 master weight and two Adam moments."""
CHECKPOINT_BYTES = 14
"""Per parameter: bf16 weight, float32 master weight and two Adam moments."""
ACTIVATION_BYTES = 34
"""Per token, layer and hidden unit with a fused attention and no recomputation (arXiv:2205.05198, eq. 2)."""
RECOMPUTED_BYTES = 2
"""The same with full recomputation: the layer's input alone (arXiv:2205.05198, section 5)."""
MEMORY_FRACTION = 0.9
"""Fraction of a device's memory for what a trainer keeps and computes, or for weights and KV (vLLM's default
`gpu_memory_utilization`)."""


def weights_bytes(parameters: int, dtype: str) -> int:
    return parameters * DTYPE_BYTES[dtype]


def kv_token_bytes(layers: int, kv_width: int, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    return kv_bytes(layers, kv_width, DTYPE_BYTES[dtype])


def activation_bytes(tokens: int, layers: int, hidden: int, *, recompute: bool) -> float:
    """Activations of a micro-batch of `tokens` tokens, on all devices of a rank together."""
    per_unit = RECOMPUTED_BYTES if recompute else ACTIVATION_BYTES
    working = ACTIVATION_BYTES * tokens * hidden if recompute else 0
    return per_unit * tokens * hidden * layers + working


def trainer_bytes(parameters: int, activations: float, *, devices: int, model_parallel: int) -> float:
    """Per device: a share of the states, and of a micro-batch's activations."""
    return parameters * STATE_BYTES / devices + activations / model_parallel


def checkpoint_bytes(parameters: int) -> int:
    """Of a whole checkpoint."""
    return parameters * CHECKPOINT_BYTES


def usable_bytes(device_bytes: float) -> float:
    """What a trainer or a replica may use of a device's memory."""
    return MEMORY_FRACTION * device_bytes


def kv_room_bytes(device_bytes: float, devices: int, weights: int) -> float:
    """What the weights of a replica on `devices` devices leave for KV. Below 0: they do not fit."""
    return usable_bytes(device_bytes) * devices - weights
