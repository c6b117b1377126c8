from __future__ import annotations

import pytest

from millrace.core.errors import DataError
from millrace.trainer.ranks.mesh import Ranks, agreed, all_or_none, first_alone


@pytest.mark.parametrize("mine", [None, OSError("a full disk")])
def test_what_fails_on_another_rank_fails_here_as_the_error_that_it_is(mine, monkeypatch):
    fault = DataError, "model.safetensors is damaged"
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value, fault])
    with pytest.raises(DataError if mine is None else OSError), all_or_none(Ranks(shard=2)):
        if mine is not None:
            raise mine


def test_what_ranks_agree_on_is_every_rank_s_answer_or_the_first_error(monkeypatch):
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value, ("two", None)])
    assert agreed(Ranks(shard=2), lambda: "one") == ["one", "two"]
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value, (None, (DataError, "damaged"))])
    with pytest.raises(DataError, match="damaged"):
        agreed(Ranks(shard=2), lambda: "one")


def test_what_the_first_rank_alone_does_fails_on_the_others_too(monkeypatch):
    assert first_alone(Ranks(), lambda: "one") == "one"
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, value: ("one", None))
    assert first_alone(Ranks(shard=2, rank=1), lambda: pytest.fail("not by this rank")) == "one"
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, value: (None, (DataError, "damaged")))
    with pytest.raises(DataError, match="damaged"):
        first_alone(Ranks(shard=2, rank=1), lambda: "one")
