"""Advantages and objectives: pure functions, written once for torch and JAX."""

from millrace.algorithms.build import Algorithm, build, of_run
from millrace.algorithms.group import ComparedGroup
from millrace.algorithms.logprobs import Namespace, Sequences, TokenLogprobs

__all__ = ["Algorithm", "ComparedGroup", "Namespace", "Sequences", "TokenLogprobs", "build", "of_run"]
