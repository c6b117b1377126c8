"""Running servers for the suite, started with this interpreter: vLLM, which takes 20 s and more, or a
stand-in for SGLang. Each server is lent to one bench after another."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bench import ALPHABET, Bench, make_model
from tests.serving import end, free_port, start_server, start_sglang, start_standin, until_ready

from millrace.conversations.tokenizer import make_character_tokenizer

ANSWER_S = 60.0
SERVED = ("qwen3 tied", "llama untied")
"""Models that are enough: families are vLLM's affair, and its engine in this process is tried with all."""


@dataclass
class Lent:
    url: str
    process: subprocess.Popen[bytes]
    bench: Bench | None = None


START = {"server": start_server, "sglang": start_standin, "sglang itself": start_sglang}
"""By the name after `--engine`, and "sglang itself" with `--installed`."""


@dataclass
class Servers:
    """All that were started, by kind and model."""

    directory: Path
    running: dict[tuple[str, str], list[Lent]] = field(default_factory=dict)

    def bench(self, kind: str, directory: Path, model: str, **options: Any) -> Bench:
        """On a server that no other bench uses now. A bench that used the server before is closed."""
        if model not in SERVED:
            pytest.skip("servers are tried with two models")
        lent = self._lend(kind, model)
        options.pop("stepwise")
        options["seeded"] = kind != "sglang itself"
        shared = {"server": lent.url, "server_wait_s": ANSWER_S, "shared_dir": str(directory / "shared")}
        lent.bench = Bench("server", directory, model, **shared, **options)
        return lent.bench

    def _lend(self, kind: str, model: str) -> Lent:
        pool = self.running.setdefault((kind, model), [])
        for lent in pool:
            if lent.bench is None or not lent.bench.used:
                if lent.bench is not None:
                    lent.bench.close()
                return lent
        pool.append(self._start(kind, model, f"{model.replace(' ', '-')}-{len(pool)}"))
        return pool[-1]

    def _start(self, kind: str, model: str, name: str) -> Lent:
        directory, port = self.directory / name, free_port()
        make_model(model, 0).save_pretrained(directory)
        make_character_tokenizer(directory, ALPHABET)
        url, log = f"http://127.0.0.1:{port}", self.directory / f"{name}.log"
        lent = Lent(url, START[kind](directory, port, log))
        try:
            until_ready(url, lent.process, log)
        except BaseException:
            end(lent.process)
            raise
        return lent

    def close(self) -> None:
        for lent in [lent for pool in self.running.values() for lent in pool]:
            if lent.bench is not None:
                lent.bench.close()
            end(lent.process)
