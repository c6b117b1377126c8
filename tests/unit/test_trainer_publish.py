"""A trainer waits for the copy of its weights; their digest is taken beside the next step."""

from __future__ import annotations

from threading import Event

import pytest
import torch
from trainer_doubles import MemoryWriter

from millrace.core.digest import digest_buffers
from millrace.core.errors import DigestMismatchError, TornVersionError
from millrace.core.types import Endpoint
from millrace.trainer.publish import publisher, rechecked
from millrace.trainer.publish.publisher import PublishBuffers, Publisher

HERE, THERE = Endpoint("memory", "here", 2, 1 << 20), Endpoint("memory", "there", 2, 1 << 20)


class Bench:
    """One weight, its optimizer and its publisher. No digest is taken before the next update has begun, or
    `go` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        self.writer, self.go, self.order = MemoryWriter(HERE), Event(), list[str]()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.optimizer.register_step_pre_hook(lambda *_: self.go.set())
        self.publisher = Publisher(PublishBuffers({"w": self.weight.detach()}, dtype), self.optimizer)
        self.optimizer.register_step_post_hook(lambda *_: self.order.append("updated"))
        honest = publisher.digest_blocks

        def digest(blocks, **options):
            assert self.go.wait(30.0)
            self.order.append("digested")
            return honest(blocks, **options)

        patch.setattr(publisher, "digest_blocks", digest)

    def begin(self, version=0, endpoint=HERE):
        self.publisher.begin(lambda: self.writer, endpoint, version)

    def current_digest(self):
        return self.publisher.buffers.digest()


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def bench(request, monkeypatch):
    return Bench(monkeypatch, request.param)


def test_the_trainer_goes_on_after_the_copy_and_its_update_waits_for_the_digest(bench):
    due = bench.current_digest()
    bench.begin()
    assert [version for version, _ in bench.writer.written] == [0]
    assert not bench.writer.ended and not bench.order
    bench.optimizer.step()
    published = bench.publisher.result()
    assert bench.order == ["digested", "updated"] and bench.writer.ended == [0]
    assert (published.version, published.digest) == (0, due) and bench.current_digest() != due
    assert published.stall_s > 0 and published.digest_s > 0


def test_a_version_is_begun_when_the_one_before_is_whole(bench):
    bench.begin(0)
    bench.optimizer.step()
    bench.begin(1)
    assert bench.writer.ended[0] == 0
    assert bench.publisher.result().version == 1 and bench.writer.ended == [0, 1]


def test_what_is_told_is_the_digest_of_the_weights_and_not_of_the_copy(bench, monkeypatch):
    honest = bench.publisher.buffers.fill
    monkeypatch.setattr(bench.publisher.buffers, "fill", lambda: [])  # a copy of nothing
    bench.begin()
    bench.go.set()
    assert bench.publisher.result().digest == digest_buffers(honest())


@pytest.mark.parametrize("method", ["fill", "end"])
def test_a_publish_that_fails_holds_up_no_update_and_can_be_repeated(bench, method, monkeypatch):
    def torn(*_):
        raise TornVersionError("another trainer took the slot")

    with monkeypatch.context() as patch:
        patch.setattr(bench.writer, method, torn)
        bench.begin()
        bench.optimizer.step()
        for _ in range(2):
            with pytest.raises(TornVersionError):
                bench.publisher.result()
    bench.begin()
    assert bench.publisher.result().version == 0 and bench.writer.ended == [0]


def test_another_relay_gets_the_version_again(bench):
    bench.go.set()
    for endpoint in (HERE, HERE, THERE):
        bench.begin(0, endpoint)
    assert bench.publisher.result().version == 0 and bench.writer.ended == [0, 0]


def test_weights_that_changed_since_they_were_published_are_refused(bench):
    bench.go.set()
    bench.begin(3)
    bench.publisher.refuse_changed(3)
    with torch.no_grad():
        bench.weight[0, 0] += 1
    bench.publisher.refuse_changed(4)  # of which nothing was published
    with pytest.raises(DigestMismatchError, match="trainer's weights of version 3 changed in memory"):
        bench.publisher.refuse_changed(3)


def test_weights_that_changed_in_memory_since_they_were_published_are_not_trained_on(bench, monkeypatch):
    monkeypatch.setattr(rechecked, "RECHECK_SHARE", 1e9)  # before every update
    bench.go.set()
    for version in range(3):
        bench.begin(version)
        bench.optimizer.step()
        bench.optimizer.step()  # of the same batch: nobody published in between
    bench.begin(3)
    bench.publisher.result()
    with torch.no_grad():
        bench.weight[1, 2] += 1.0
    bench.order.clear()
    with pytest.raises(DigestMismatchError, match="weights of version 3 changed in memory"):
        bench.optimizer.step()
    assert "updated" not in bench.order


def test_the_digest_before_an_update_takes_a_hundredth_of_the_time(bench, monkeypatch):
    """Each takes 1 s, and an update 9 s without it: it is taken once in 11 updates."""
    now_s, checked = [0.0], list[int]()
    monkeypatch.setattr(publisher.time, "perf_counter", lambda: now_s[0])
    bench.go.set()
    bench.publisher._checked_s = 0.0
    refuse = bench.publisher.refuse_changed

    def slow(version):
        refuse(version)
        checked.append(version)
        now_s[0] += 1.0

    monkeypatch.setattr(bench.publisher, "refuse_changed", slow)
    for version in range(60):
        bench.begin(version)
        now_s[0] += 10.0
        bench.optimizer.step()
    assert checked == [0, 10, 20, 30, 40, 50]
