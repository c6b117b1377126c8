"""One device in turns: the decision alone, and in a small world of its own in which everything dies."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from millrace.schedule.device_turns import DeviceView, HandOver, Use, hand_over

ASLEEP, WAKING, AWAKE, FALLING = Use.ASLEEP, Use.WAKING, Use.AWAKE, Use.FALLING_ASLEEP


def test_replicas_wake_when_the_trainer_wants_nothing_and_sleeps() -> None:
    view = DeviceView(False, False, {"a": ASLEEP, "b": AWAKE, "c": WAKING, "d": FALLING})
    assert hand_over(view) == HandOver(wakes=("a",))


def test_no_replica_wakes_while_the_trainer_is_awake() -> None:
    assert hand_over(DeviceView(False, True, {"a": ASLEEP})) == HandOver(granted=True)


def test_replicas_sleep_when_the_trainer_wants_the_device() -> None:
    view = DeviceView(True, False, {"a": ASLEEP, "b": AWAKE, "c": WAKING})
    assert hand_over(view) == HandOver(sleeps=("b",))


@pytest.mark.parametrize("use", [WAKING, AWAKE, FALLING])
def test_the_trainer_waits_for_the_last_replica(use: Use) -> None:
    assert not hand_over(DeviceView(True, False, {"a": ASLEEP, "b": use})).granted
    assert hand_over(DeviceView(True, False, {"a": ASLEEP})).granted


def test_dead_replicas_hold_no_memory() -> None:
    assert hand_over(DeviceView(True, False, {})).granted


@dataclass
class Stage:
    """Workers that obey after a while, or die, and a trainer that wants the device now and then."""

    rng: Random
    wanted: bool = True
    trainer_awake: bool = False
    uses: dict[str, Use] = field(default_factory=dict)
    turns: int = 0

    def tick(self, death: float) -> None:
        for name, use in list(self.uses.items()):
            if self.rng.random() < death:
                del self.uses[name]
            elif self.rng.random() < 0.5 and use in (WAKING, FALLING):
                self.uses[name] = AWAKE if use is WAKING else ASLEEP
        for name in "abc":
            if name not in self.uses and self.rng.random() < 0.3:
                self.uses[name] = ASLEEP
        if self.trainer_awake and self.rng.random() < death:
            self.trainer_awake = False  # its successor has to load
        elif self.trainer_awake and self.rng.random() < 0.5:
            self.wanted = self.trainer_awake = False
            self.turns += 1
        elif not self.wanted and AWAKE in self.uses.values():
            self.wanted = self.rng.random() < 0.3  # a batch is whole

    def decide(self) -> None:
        turn = hand_over(DeviceView(self.wanted, self.trainer_awake, dict(self.uses)))
        self.uses |= dict.fromkeys(turn.sleeps, FALLING) | dict.fromkeys(turn.wakes, WAKING)
        if turn.granted and self.wanted:
            self.trainer_awake = True
        holding = [use for use in self.uses.values() if use is not ASLEEP]
        assert not (self.trainer_awake and holding)


@pytest.mark.parametrize("death", [0.0, 0.05, 0.3])
def test_one_side_at_a_time_holds_the_device_and_every_turn_ends(death: float) -> None:
    for seed in range(200):
        stage = Stage(Random(seed))
        for _ in range(300):
            stage.tick(death)
            stage.decide()
        assert stage.turns > 5, seed
