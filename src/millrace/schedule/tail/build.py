"""The presets of this folder, by their tables of the configuration."""

from __future__ import annotations

from typing import assert_never

from millrace.config.tables.schedules import Heddle, RollFlash, StaleFlow, StreamRL
from millrace.schedule.schedule import Schedule
from millrace.schedule.tail.heddle import heddle
from millrace.schedule.tail.roll_flash import roll_flash
from millrace.schedule.tail.staleflow import staleflow
from millrace.schedule.tail.streamrl import streamrl

Tail = RollFlash | StreamRL | StaleFlow | Heddle


def build_tail(keys: Tail) -> Schedule:
    match keys:
        case RollFlash():
            return roll_flash(keys)
        case StreamRL():
            return streamrl(keys)
        case StaleFlow():
            return staleflow(keys)
        case Heddle():
            return heddle(keys)
        case unknown:
            assert_never(unknown)
