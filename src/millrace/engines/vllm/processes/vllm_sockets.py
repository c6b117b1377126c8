"""vLLM's processes talk through sockets with names, in a directory that no other user can enter. Their names
go when all are connected. So nothing is left of a replica that is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory, gettempdir

DIRECTORY_PREFIX = "vllm-"
_BYTES_MAX = 50  # of the path of `gettempdir`: with 107 bytes the name of a socket ends


@contextmanager
def unnamed_sockets() -> Iterator[None]:
    """vLLM is opened in this block. When the block ends, its processes must have heard of each other."""
    from vllm import envs

    envs.disable_envs_cache()  # an earlier engine in this process has another directory
    parent = gettempdir() if len(os.fsencode(gettempdir())) <= _BYTES_MAX else "/tmp"
    with TemporaryDirectory(prefix=DIRECTORY_PREFIX, dir=parent, ignore_cleanup_errors=True) as directory:
        os.environ["VLLM_RPC_BASE_PATH"] = directory
        yield
