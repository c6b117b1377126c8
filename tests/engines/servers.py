"""Running servers of vLLM for the suite, started with this interpreter. A start takes 20 s and more, so each
server is lent to one bench after another."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bench import ALPHABET, Bench, make_model
from tests.serving import end, free_port, start_server, until_ready

from millrace.environments.tokenizer import make_character_tokenizer

ANSWER_S = 60.0
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

    def bench(self, directory: Path, model: str, **options: Any) -> Bench:
        """On a server that no other bench uses now. A bench that used the server before is closed."""
        if model not in SERVED:
            pytest.skip("servers are tried with two models")
        lent = self._lend(model)
        options.pop("stepwise")
        shared = {"server": lent.url, "server_wait_s": ANSWER_S, "shared_dir": str(directory / "shared")}
        lent.bench = Bench("server", directory, model, **shared, **options)
        return lent.bench

    def _lend(self, model: str) -> Lent:
        pool = self.running.setdefault(model, [])
        for lent in pool:
            if lent.bench is None or not lent.bench.used:
                if lent.bench is not None:
                    lent.bench.close()
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
