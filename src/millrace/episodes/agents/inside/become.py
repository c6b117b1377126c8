"""A forked process becomes an agent: descriptors, limits, signals, variables, and then the program."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from millrace.devices.syscalls import MEANT, prctl
from millrace.rewards.limits import limit_process_memory

PR_SET_PDEATHSIG = 1
RESTORED = tuple(signal.valid_signals() - MEANT)


def become_agent(request: dict[str, Any], warden: int, output: int) -> None:
    """Everything but the program itself. Raises: OSError.

    Args:
        warden: the process id of the parent. Without that process there is no agent.
        output: a descriptor for stdout and stderr.
    """
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != warden:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.chdir(request["directory"])
    with suppress(OSError):  # without memory on the host, the kernel ends agents before their worker
        Path("/proc/self/oom_score_adj").write_text("500")
    is_function = request["command"] is None
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a thread of the worker may have blocked some
    for number in RESTORED:
        signal.signal(number, signal.SIG_DFL)
    if is_function:  # as in a Python that was started anew
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.environ.clear()
        os.environ.update(request["environment"])
    _limit(request["limits"], is_function)


def _limit(limits: dict[str, Any], is_function: bool) -> None:
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: limits["open_files"]}
    if limits["cpu_s"] is not None:
        bounds[resource.RLIMIT_CPU] = limits["cpu_s"]
    if limits["memory_mb"] is not None and not is_function:
        bounds[resource.RLIMIT_DATA] = limits["memory_mb"] * 2**20
    for kind, most in bounds.items():
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    if limits["memory_mb"] is not None and is_function:
        limit_process_memory(limits["memory_mb"])
