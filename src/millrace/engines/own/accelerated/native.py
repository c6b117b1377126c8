"""The forward pass on a CPU with a C compiler: torch multiplies, `native.c` does the rest, in float32.

Half of a small model's step is not matmuls, but attention over padded keys and the cost of calls. The C code
is compiled at its first use, in less than a second, and cached for the user. The cache is a directory that
nobody else can write into; a file's name has the digest of its bytes. Without a compiler, or if the model or
the settings need more than the C code has, the engine computes in torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from millrace.core import files
from millrace.core.errors import DataError
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.attention import BUCKET, Kernel, Segment
from millrace.engines.own.cache import KVCache
from millrace.engines.own.forward import ForwardPass
from millrace.engines.own.parameters import Layer, Parameters

Tensor = torch.Tensor

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC")
THREADED = "-fopenmp"
"""If the compiler knows no OpenMP, the C code has one thread. torch's library of OpenMP serves both."""
WIDTH = 16  # of the C code's vectors, of which a head has a whole number
GATES = {"silu": (1.0, 0.0), "gelu_pytorch_tanh": (1.5957691216, 0.0713548163)}
"""a and b of `gate`, by the activation's name in transformers."""
COMPILE_S_MAX = 60.0
LOG = logging.getLogger(__name__)


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The compiled C code; or the reason why there is none, which the log has too."""
    command = os.environ.get("CC") or "cc"
    try:
        if (compiler := shutil.which(command)) is None:
            raise FileNotFoundError(f"there is no C compiler ({command})")
        inputs = "\n".join(
            [SOURCE.read_text(), " ".join([*FLAGS, THREADED]), _identity(Path(compiler)), _processor()]
        )
        key = f"native-{hashlib.sha256(inputs.encode()).hexdigest()[:20]}"
        root = _cache()
        return _declared(ctypes.CDLL(str(_cached(root, key) or _compile(compiler, root, key)))), ""
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        LOG.warning("the engine computes without its C code: %s", error)
        return None, str(error)


def _cache() -> Path:
    """Raises: RuntimeError: there is no home directory. OSError: the cache cannot be made, or is another
    user's."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millrace"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid == os.geteuid():
        root.chmod(0o700)
    if files.others_may_write(root):
        raise PermissionError(f"{root} belongs to another user: what it holds would be run as code")
    return root


def _cached(root: Path, key: str) -> Path | None:
    """The file that was compiled before. A damaged file, or one that others may write, is removed."""
    for path in root.glob(f"{key}-*.so"):
        try:
            if not files.others_may_write(path) and path.stem == f"{key}-{_digest(path)}":
                return path
        except FileNotFoundError:
            continue  # another process removed it just now
        LOG.warning("%s is not what was compiled there: it is removed and made anew", path)
        path.unlink(missing_ok=True)
    return None


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(files.read(path)).hexdigest()[:32]
    except DataError:
        return ""


def _identity(compiler: Path) -> str:
    stat = compiler.resolve().stat()
    return f"{compiler.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _processor() -> str:
    """The processor is part of the key, because several hosts may share a home directory."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"


def _compile(compiler: str, root: Path, key: str) -> Path:
    """Several processes may compile at once: each file is complete when it gets its name."""
    with tempfile.TemporaryDirectory(dir=root) as directory:
        draft = Path(directory) / key
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(draft), "-lm"]
        run = partial(subprocess.run, capture_output=True, timeout=COMPILE_S_MAX)
        if run([*command, THREADED]).returncode != 0:
            run(command, check=True)
        draft.chmod(0o700)
        return draft.replace(root / f"{key}-{_digest(draft)}.so")


def _declared(code: ctypes.CDLL) -> ctypes.CDLL:
    address, count, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    code.norm.argtypes = (address, count, address, address, address, count)
    code.gate.argtypes = (address, count, address, address, count, number, number)
    code.attend.argtypes = (address, address, count, *[address] * 5)
    for function in (code.norm, code.gate, code.attend):
        function.restype = None
    return code


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "head_dim", "positions", "threads")),
        *((name, ctypes.c_float) for name in ("eps", "from_one", "scale")),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "cos", "sin", "q_norm", "k_norm")),
        *((name, ctypes.c_long) for name in ("rotated", "window")),
    )


@dataclass(frozen=True, slots=True)
class _Bound:
    """A layer, and the C code's argument for its attention, which has addresses of `tensors`."""

    layer: Layer
    attention: _Attention
    tensors: tuple[Tensor | None, ...]


@dataclass(slots=True)
class NativeRows:
    """The slot of each row's token. As `DecodeAttention`, the rows are valid for `num_steps` steps."""

    slots_M: Tensor
    num_steps: int

    def advance(self) -> None:
        self.num_steps -= 1


class NativePass:
    """Forward passes over tokens of any slots."""

    def __init__(
        self,
        code: ctypes.CDLL,
        architecture: Architecture,
        forward: ForwardPass,
        cache: KVCache,
        kernel: Kernel,
        threads: int,
    ) -> None:
        self._code, self._architecture, self._forward = code, architecture, forward
        self._cache, self._windows = cache, kernel.windows
        self._gate = GATES[architecture.activation]
        sizes = (
            architecture.num_heads,
            architecture.num_kv_heads,
            architecture.head_dim,
            cache.num_positions,
            threads,
        )
        self._shape = _Shape(*sizes, architecture.eps, float(architecture.norm_from_one), kernel.scale)
        self._scores = torch.zeros(threads, cache.num_positions)
        self._bound: dict[int, list[_Bound]] = {}  # by set of weights
        self._space: list[Tensor] = []

    def decode(self, positions: Sequence[int]) -> NativeRows:
        """One new token in each of the first slots."""
        steps = min(BUCKET, self._cache.num_positions - max(positions))
        return NativeRows(torch.arange(len(positions)), steps)

    def prefill(self, segments: Sequence[Segment]) -> NativeRows:
        return NativeRows(torch.tensor([s.slot for s in segments for _ in range(s.count)]), 0)

    def forget(self) -> None:
        """The weights have changed."""
        self._bound.clear()

    def hidden(
        self, weights: Parameters, tokens_M: Tensor, positions_M: Tensor, attention: NativeRows
    ) -> Tensor:
        """Final hidden states (M, hidden), valid until the next call. Tokens of a slot are in their order.
        Keys and values are cached."""
        rows = len(tokens_M)
        layers = self._bound_to(weights)
        if not self._space or len(self._space[0]) < rows:
            self._space = self._allocate(rows, layers[0].layer)
        x, normed, qkv, attended, gate_up, gated = (each[:rows] for each in self._space)
        if weights.embedding.dtype == x.dtype:
            torch.index_select(weights.embedding, 0, tokens_M, out=x)
        else:
            x.copy_(weights.embedding[tokens_M])
        if self._architecture.embedding_scale != 1.0:
            x *= self._architecture.embedding_scale
        shape, width = ctypes.byref(self._shape), gated.shape[1]
        of_rows = attention.slots_M.data_ptr(), positions_M.data_ptr()
        out, scores = attended.data_ptr(), self._scores.data_ptr()
        for bound in layers:
            layer = bound.layer
            self._norm(x, layer.input_norm, normed)
            qkv = self._multiply(normed, layer.qkv, layer.qkv_bias, qkv)
            where = (*of_rows, qkv.data_ptr(), out, scores)
            self._code.attend(shape, ctypes.byref(bound.attention), rows, *where)
            self._add(x, attended, layer.out, layer.out_bias, layer.out_norm, normed)
            self._norm(x, layer.mlp_norm, normed)
            gate_up = self._multiply(normed, layer.gate_up, layer.gate_up_bias, gate_up)
            self._code.gate(shape, rows, gate_up.data_ptr(), gated.data_ptr(), width, *self._gate)
            self._add(x, gated, layer.down, layer.down_bias, layer.down_norm, normed)
        self._norm(x, weights.norm, normed)
        return normed

    def _norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        rows, width = x.shape
        if weight.dtype != x.dtype:
            weight = weight.float()
        addresses = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        self._code.norm(ctypes.byref(self._shape), rows, *addresses, width)

    def _add(
        self, to: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, memory: Tensor
    ) -> None:
        """to += x weight^T + bias, normalised if there is a `norm`."""
        if norm is not None:
            out = self._multiply(x, weight, bias, memory)
            self._norm(out, norm, out)
            to += out
            return
        self._forward.matmul.add_linear(to, x, weight, bias)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor) -> Tensor:
        """x weight^T + bias, in `memory`; oneDNN writes into new memory instead."""
        matmul = self._forward.matmul
        if not matmul.in_place(x, weight):
            return matmul.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=memory)
        return torch.addmm(bias, x, weight.t(), out=memory)

    def _allocate(self, rows: int, layer: Layer) -> list[Tensor]:
        """Memory of a call: the residual stream, normalised, q to v, attended, gate and up, gated."""
        qkv, hidden = layer.qkv.shape
        attended, gate_up, gated = layer.out.shape[1], layer.gate_up.shape[0], layer.down.shape[1]
        return [torch.zeros((rows, width)) for width in (hidden, hidden, qkv, attended, gate_up, gated)]

    def _bound_to(self, weights: Parameters) -> list[_Bound]:
        if id(weights) not in self._bound:
            self._bound[id(weights)] = [self._bind(i, layer) for i, layer in enumerate(weights.layers)]
        return self._bound[id(weights)]

    def _bind(self, index: int, layer: Layer) -> _Bound:
        cos, sin = self._forward.tables[self._architecture.ropes[index]]
        norms = (None if norm is None else norm.float() for norm in (layer.q_norm, layer.k_norm))
        tensors = (self._cache.keys[index], self._cache.values[index], cos, sin, *norms)
        assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), index
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        attention = _Attention(*addresses, cos.shape[-1], self._windows[index] or 0)
        return _Bound(layer, attention, tensors)


def native_pass(
    architecture: Architecture, forward: ForwardPass, cache: KVCache, kernel: Kernel, *, threads: int
) -> tuple[NativePass | None, str]:
    """The pass in C, which divides rows among `threads`. None and the reason: there is no C code here. None
    and "": the C code lacks something that this engine needs."""
    fits = (
        type(cache) is KVCache
        and cache.values.device.type == "cpu"
        and cache.values.dtype == torch.float32
        and kernel.plain
        and not (architecture.routed or architecture.neighbours)
        and architecture.residual_scale == 1.0
        and architecture.activation in GATES
        and architecture.head_dim % WIDTH == 0
    )
    code, why = library() if fits else (None, "")
    if code is None:
        return None, why
    return NativePass(code, architecture, forward, cache, kernel, threads), why
