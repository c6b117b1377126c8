"""A canary beside a run of real processes: never trained, warned of, and found by the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.long import long
from tests.runs import events, train, weights

from millrace.diagnose.examine import examine
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("warm")

REWARD = 'reward={{kind = "function", path = "{}/hack.py:reward"}}'
CANARY = 'evaluations=[{name = "wrong", canary = "wrong-gold", every = 2, prompts = 24, samples = 3}]'


@long
def test_a_hacked_reward_is_warned_of_and_found_and_an_honest_one_is_not(start: Path, tmp_path: Path) -> None:
    (tmp_path / "hack.py").write_text("def reward(completion, answer): return len(set(completion)) > 1\n")
    honest = train(start, tmp_path / "honest", CANARY, "reward.threshold=1.0")
    hacked = train(start, tmp_path / "hacked", CANARY, REWARD.format(tmp_path))
    assert "canary-rewarded" in [finding["fault"] for finding in examine(hacked)["findings"]]
    [warned] = [event.fields["reason"] for event in events(hacked, "warned")]
    assert "canary wrong: at version 0" in warned and "canary/spell_backward" in warned
    assert "canary-rewarded" not in [finding["fault"] for finding in examine(honest)["findings"]]
    assert events(honest, "warned") == []
    with LedgerReader(honest.ledger) as reader:
        assert {one.row_id.split("/")[0] for one in reader.attempts("wrong", 0)} == {"canary"}
        assert reader.evaluations()[-1].metrics["reward_mean"] == 0.0


def test_a_canary_changes_nothing_about_what_is_learned(
    start: Path, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    assert weights(train(start, tmp_path / "run", CANARY)) == weights(undisturbed)
