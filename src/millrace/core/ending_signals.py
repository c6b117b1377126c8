"""The signals that ask a process to end: every one that ends a process by default, and can be handled."""

from __future__ import annotations

import signal

STACKS = signal.SIGUSR1
"""Asks for the stacks of a process, which goes on."""

_OTHER = {
    *(signal.SIGKILL, signal.SIGSTOP),  # nobody can handle these
    *(signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGURG),
    signal.SIGWINCH,  # as those before: no process ends by it
    *(signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGSEGV, signal.SIGSYS),  # as those before: the process itself is broken
    *(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores these: a write fails
    STACKS,
}
ENDING = tuple(sorted(signal.valid_signals() - _OTHER))
"""Of a terminal (SIGINT, SIGHUP, SIGQUIT), schedulers (SIGTERM, SIGUSR2, SIGXCPU), timers and others."""
