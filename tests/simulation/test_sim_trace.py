from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import millrace_sim
from millrace.core.events import Event
from tests.simulation.sim_digests import digests
from tests.simulation.sim_scenario import chaotic

SCENARIO = Path(__file__).with_name("sim_scenario.py")


def digest_in_a_process(seed: int, hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, str(SCENARIO), str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_the_same_seed_gives_the_same_digest_in_every_process() -> None:
    here = millrace_sim.run(chaotic(7), seed=7)
    assert digest_in_a_process(7, "1") == digest_in_a_process(7, "2") == here


def test_another_seed_gives_another_digest() -> None:
    assert millrace_sim.run(chaotic(7), seed=7) != millrace_sim.run(chaotic(8), seed=8)


def test_the_same_seeds_give_the_same_digests_on_every_python_version() -> None:
    """The file was written by 3.12 and is what 3.11 gives: no version may differ from it."""
    written = json.loads(SCENARIO.with_name("sim_digests.json").read_text())
    assert digests() == written, (
        "if these runs are meant to go another way, write the file anew: sim_digests.py says how"
    )


def digest_of(*events: Event) -> str:
    digest = millrace_sim.TraceDigest()
    for event in events:
        digest(event)
    return digest.hexdigest()


def test_the_order_of_fields_does_not_enter_the_digest_but_every_value_does() -> None:
    base = digest_of(Event("k", 1.0, 0.0, {"a": 1, "b": 2}))
    assert digest_of(Event("k", 1.0, 5.0, {"b": 2, "a": 1})) == base
    assert digest_of(Event("k", 1.0, 0.0, {"a": 1, "b": 3})) != base
    assert digest_of(Event("k", 1.0 + 2**-52, 0.0, {"a": 1, "b": 2})) != base
    assert digest_of(Event("l", 1.0, 0.0, {"a": 1, "b": 2})) != base


def test_a_field_without_a_faithful_encoding_is_refused() -> None:
    with pytest.raises(TypeError):
        digest_of(Event("k", 1.0, 0.0, {"a": object()}))
