"""Advantages and per-token objectives: pure functions, written once for torch and JAX."""

from millrace.algorithms.build import Algorithm, build
from millrace.algorithms.logprobs import Namespace, TokenLogprobs

__all__ = ["Algorithm", "Namespace", "TokenLogprobs", "build"]
