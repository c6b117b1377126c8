"""How many threads torch computes with in this process, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from millrace.devices.inventory import environment_threads


def threads_of_process() -> int:
    """The environment's number, else torch's: a forked worker gets the variable after torch was imported."""
    return environment_threads() or torch.get_num_threads()


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """What is computed inside runs on `count` threads, the calling thread among them."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
