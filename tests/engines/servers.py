"""Running servers of vLLM for the suite, started with this interpreter. A start takes 20 s and more, so each
server is lent to one bench after another."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bench import ALPHABET, Bench, make_model
from tests.serving import end, free_port, start_server, until_ready

from millrace.environments.tokenizer import make_character_tokenizer

SERVED = ("qwen3 tied", "llama untied")
"""Models that are enough: families are vLLM's affair, and its engine in this process is tried with all."""


@dataclass
class Lent:
    url: str
    process: subprocess.Popen[bytes]
    bench: Bench | None = None


@dataclass
class Servers:
    """All that were started, by model."""

    directory: Path
    running: dict[str, list[Lent]] = field(default_factory=dict)

    def lend(self, model: str, busy: list[Bench]) -> Lent:
        """One whose bench is not among those that are `busy`; that bench is closed. Else a new one."""
        if model not in SERVED:
            pytest.skip("servers are tried with two models")
        pool = self.running.setdefault(model, [])
        for lent in pool:
            if all(lent.bench is not bench for bench in busy):
                if lent.bench is not None:
                    lent.bench.close()
                lent.bench = None
                return lent
        return self._start(model, f"{model.replace(' ', '-')}-{len(pool)}")

    def _start(self, model: str, name: str) -> Lent:
        directory, port = self.directory / name, free_port()
        make_model(model, 0).save_pretrained(directory)
        make_character_tokenizer(directory, ALPHABET)
        url, log = f"http://127.0.0.1:{port}", self.directory / f"{name}.log"
        lent = Lent(url, start_server(directory, port, log))
        self.running[model].append(lent)
        until_ready(url, lent.process, log)
        return lent

    def close(self) -> None:
        for lent in [lent for pool in self.running.values() for lent in pool]:
            if lent.bench is not None:
                lent.bench.close()
            end(lent.process)
