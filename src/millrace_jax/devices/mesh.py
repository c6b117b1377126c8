"""How tensors lie on a mesh of devices: one table of axis rules.

    data      rows of a set, with all weights on each device
    fsdp      rows of a set, and weights, gradients and moments (arXiv:1910.02054, stage 3)
    tensor    heads, intermediate columns and the vocabulary (arXiv:1909.08053)
    sequence  tokens of each row; keys and values are gathered (arXiv:2407.21783, section 3.3.2)

The compiler (GSPMD, arXiv:2105.04663) inserts the collectives. No axis changes a gradient, apart from
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millrace.core.errors import ConfigError
from millrace.devices.low_rank import DOWN, UP
from millrace_jax.decoder import Decoder
from millrace_jax.row_arrays import TOKENS_MIN

Array = Any
Axes = str | tuple[str, ...] | None

AXES = ("data", "fsdp", "tensor", "sequence")
ROWS = ("data", "fsdp")
"""The axes that divide the rows of a set."""

MATRICES: dict[str, tuple[Axes, Axes]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("tensor", "fsdp")),
    "o_proj": ("fsdp", "tensor"),
    **dict.fromkeys(("gate_proj", "up_proj"), ("tensor", "fsdp")),
    "down_proj": ("fsdp", "tensor"),
}
"""The axes of outputs and inputs of each matrix of a layer."""
RULES: dict[str, tuple[Axes, ...]] = {
    "embed_tokens.weight": ("tensor", "fsdp"),
    "lm_head.weight": ("tensor", "fsdp"),
    **{f"{name}.weight": axes for name, axes in MATRICES.items()},
    **{f"{name}.bias": ("tensor",) for name, axes in MATRICES.items() if axes[0] == "tensor"},
    **{f"{name}.{DOWN}": (None, inputs) for name, (_, inputs) in MATRICES.items()},
    **{f"{name}.{UP}": (outputs, None) for name, (outputs, _) in MATRICES.items()},
}
"""The axis that divides each dimension of a tensor of one layer, by the end of its name. Other tensors are
vectors as long as the hidden size or a head: each device has them whole."""


def make_mesh(shard: int, tensor: int, sequence: int, devices: Sequence[Any]) -> Mesh:
    """A mesh of all `devices`, whose axis `data` is what the other axes leave. Devices that share a layer are
    neighbours.

    Raises: ConfigError: the number of devices is no multiple of the product."""
    each = shard * tensor * sequence
    if not devices or len(devices) % each:
        raise ConfigError(
            f"`trainer.shard` ({shard}) x `trainer.tensor` ({tensor}) x `trainer.sequence` ({sequence}) is "
            f"{each}, and does not divide the {len(devices)} devices that JAX sees.\n  Set them to a divisor"
        )
    shape = len(devices) // each, shard, tensor, sequence
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def refuse_undivided(shape: Decoder, shard: int, tensor: int, sequence: int) -> None:
    """Raises: ConfigError: an axis does not divide a dimension of the model."""
    tensor_sizes = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.layer_shapes["mlp.gate_proj.weight"][0],
        "vocab_size": shape.vocab,
    }
    checks = [
        ("shard", shard, "the model's `hidden_size`", shape.hidden_size),
        *(("tensor", tensor, f"the model's `{name}`", size) for name, size in tensor_sizes.items()),
        ("sequence", sequence, "the tokens of the shortest row", TOKENS_MIN),
    ]
    for key, devices, name, size in checks:
        if size % devices:
            raise ConfigError(
                f"`trainer.{key}` ({devices}) must divide {name} ({size}).\n"
                f"  Set it to a divisor, such as {math.gcd(devices, size)}"
            )


def rows_at_once(mesh: Mesh) -> int:
    return int(mesh.shape["data"] * mesh.shape["fsdp"])


def spec(name: str) -> tuple[Axes, ...]:
    """The axis of each dimension of a tensor of one layer, or outside of layers. Empty: it is not divided."""
    return RULES.get(".".join(name.split(".")[-2:]), ())


def sharding(mesh: Mesh, name: str, *, stacked: bool) -> NamedSharding:
    """How a tensor lies on the mesh. `stacked`: it has all layers, which are not divided."""
    return NamedSharding(mesh, PartitionSpec(*((None,) if stacked else ()), *spec(name)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


# ------------------------------------------------------------ in traced functions


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, in which `divided` and `gathered` act. Without a mesh they leave arrays as they are. A
    program has the name of the function, that of a `partial` too."""

    @wraps(getattr(function, "func", function))
    def traced(*args: Any, **options: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **options)

    return traced


def size_of(*axes: str) -> int:
    """Devices along these axes together."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(1 if mesh.empty else mesh.shape[axis] for axis in axes)


def divided(x: Array, *axes: Axes) -> Array:
    """`x`, each dimension divided by its axis. Dimensions without one are whole on each device."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def gathered(name: str, weight: Array) -> Array:
    """A tensor of one layer as matrix products need it: whole along `fsdp`. Its gradient is divided again."""
    axes = spec(name)
    return _gathered(axes, weight) if "fsdp" in axes and size_of("fsdp") > 1 else weight


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axes: tuple[Axes, ...], weight: Array) -> Array:
    return divided(weight, *_whole(axes))


def _whole(axes: tuple[Axes, ...]) -> tuple[Axes, ...]:
    return tuple(None if axis == "fsdp" else axis for axis in axes)


def _gathered_forward(axes: tuple[Axes, ...], weight: Array) -> tuple[Array, None]:
    return _gathered(axes, weight), None


def _gathered_backward(axes: tuple[Axes, ...], _: None, gradient: Array) -> tuple[Array]:
    """Devices add up their rows' gradients before they divide the sum. Otherwise rows would be exchanged."""
    return (divided(divided(gradient, *_whole(axes)), *axes),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint`: everything is kept for the gradient, apart from gathered weights."""
    return primitive.name not in ("sharding_constraint", "custom_vjp_call")
