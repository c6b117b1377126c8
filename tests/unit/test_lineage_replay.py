"""A version that is published again is held to what it was."""

from __future__ import annotations

import pytest
from ledger_records import ready_group, step_of

from millrace.controller.state.lineage import VERSIONS_REMEMBERED, Lineage, replay_difference
from millrace.core.errors import DigestMismatchError, UnknownVersionError
from millrace.core.types import Published, VersionRecord
from millrace.ledger import SqliteLedger

FIRST = VersionRecord(3, "aaaa", "one CPU")


def test_a_new_version_and_equal_weights_differ_in_nothing():
    assert replay_difference([], FIRST) == ""
    assert replay_difference([FIRST], VersionRecord(3, "aaaa", "another CPU")) == ""


def test_the_same_arithmetic_explains_no_difference():
    with pytest.raises(DigestMismatchError, match=r"version 3 was published with digest aaaa.* it has bbbb"):
        replay_difference([FIRST], VersionRecord(3, "bbbb", "one CPU"))


def test_another_machine_explains_it():
    why = replay_difference([FIRST], VersionRecord(3, "bbbb", "another CPU"))
    assert why == "its steps were done again with other arithmetic: one CPU -> another CPU"


def test_so_does_a_device_that_does_not_repeat_itself():
    assert "up to rounding" in replay_difference([FIRST], VersionRecord(3, "bbbb", ""))


def test_either_of_two_published_weights_is_the_version():
    both = [FIRST, VersionRecord(3, "bbbb", "another CPU")]
    assert replay_difference(both, VersionRecord(3, "aaaa", "another CPU")) == ""
    assert replay_difference(both, VersionRecord(3, "bbbb", "another CPU")) == ""


def test_what_was_published_is_in_the_record_until_the_run_goes_back(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = SqliteLedger(path, run={})
    batch = ready_group(0)
    ledger.admit([batch])
    records = [VersionRecord(0, "0000", "x"), VersionRecord(1, "1111", "x"), VersionRecord(1, "2222", "y")]
    ledger.record_version(records[0])
    assert ledger.version_records(0) == records[:1]
    ledger.commit_step(step_of(1, batch))
    for record in records[1:]:
        ledger.record_version(record)
    ledger.close()
    again = SqliteLedger(path, run={})
    assert (again.version_records(0), again.version_records(1)) == (records[:1], records[1:])
    again.rewind(0)
    assert (again.version_records(0), again.version_records(1)) == (records[:1], [])
    again.close()


def test_a_version_of_long_ago_is_unknown_by_its_name():
    lineage = Lineage()
    for version in range(VERSIONS_REMEMBERED + 1):
        lineage.note_digest(Published(version, f"digest {version}", 0, 0.0))
    assert lineage.digest(1) == "digest 1"
    with pytest.raises(UnknownVersionError, match=f"version 0 .* newest {VERSIONS_REMEMBERED} that"):
        lineage.digest(0)
