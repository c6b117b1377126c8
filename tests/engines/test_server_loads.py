"""A real server that computes with other weights than were published is found out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import ALPHABET, Bench, OpenBench, make_model, prompt_of
from servers import ANSWER_S, START
from tests.serving import end, free_port, start_server, until_ready

from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.errors import ConfigError, DigestMismatchError
from millrace.core.types import Sampling
from millrace.engines.server import vllm_server
from millrace.engines.server.client import ANSWER_S as SERVER_ANSWER_S
from millrace.engines.server.client import Client

MODEL = "qwen3 tied"
FREE = Sampling(max_tokens=20)

pytestmark = pytest.mark.computed


@pytest.fixture(autouse=True)
def _only_of_servers(kind: str) -> None:
    if kind not in START:
        pytest.skip("of servers alone")


@pytest.fixture
def tied_server(kind: str, tmp_path: Path) -> Iterator[str]:
    """Its head is tied to the embedding, as the model says."""
    if kind != "server":
        pytest.skip("of vLLM alone")
    directory, port = tmp_path / "model", free_port()
    make_model(MODEL, 0).save_pretrained(directory)
    make_character_tokenizer(directory, ALPHABET)
    process = start_server(directory, port, tmp_path / "log", **{"hf-overrides": None})
    try:
        until_ready(f"http://127.0.0.1:{port}", process, tmp_path / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def test_a_stale_packed_head_is_refused_and_the_proof_finds_it_too(
    tied_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"server": tied_server, "server_wait_s": ANSWER_S, "shared_dir": str(tmp_path / "shared")}
    with pytest.raises(ConfigError, match=r"""--hf-overrides '\{"tie_word_embeddings": false\}'"""):
        Bench("server", tmp_path / "bench", MODEL, **shared)
    monkeypatch.setattr(vllm_server, "_unfit_cpu", lambda settings, requirements: iter(()))
    bench = Bench("server", tmp_path / "bench", MODEL, **shared)
    bench.submit([bench.work(prompt_of(1, 9), FREE)])
    with pytest.raises(DigestMismatchError, match=r"was given version 0 .* and computes another"):
        bench.serve(1)
    assert bench.engine.version == -1
    assert not bench.engine.has_work and bench.engine.take_progress() == []
    bench.close()


def test_weights_of_another_name_are_found_with_the_end_of_a_request(fresh_bench: OpenBench) -> None:
    bench = fresh_bench(MODEL)
    bench.serve(1)
    Client(bench.options.server)._ask(
        "POST", "/update_weight_version", SERVER_ANSWER_S, json={"new_version": "another run's"}
    )
    with pytest.raises(DigestMismatchError, match=r"another run's.*somebody else loads weights into it"):
        bench.play([bench.work(prompt_of(1, 9), FREE)])
    bench.close()  # whatever it does on, the server's next answer is refused as well
