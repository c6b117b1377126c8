"""Texts are encoded alike by many threads at once: tokenizers of transformers keep a switch inside."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millrace.environments.tokenizer import END, encode_prompt, load_tokenizer, make_character_tokenizer
from millrace.environments.turns.encoding import Encoding


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    make_character_tokenizer(tmp_path, "abcden<|>")
    return load_tokenizer(tmp_path)


def test_threads_do_not_change_what_a_special_token_is(tokenizer: Any) -> None:
    encoding, text = Encoding(tokenizer), f"a{END}" * 50
    jobs = [
        lambda: encoding.template(text),
        lambda: encoding.plain(text),
        lambda: encode_prompt(tokenizer, text),
    ]
    alone = [job() for job in jobs]
    assert alone[0] == alone[2] != alone[1]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda n: jobs[n % 3](), range(1500)))
    assert all(ids == alone[n % 3] for n, ids in enumerate(together))
