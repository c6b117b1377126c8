"""Calls of one trajectory: in order, each answered once, and a retry is no call."""

from __future__ import annotations

import threading
import time

import pytest

from millrace.episodes.gateway import sessions
from millrace.episodes.gateway.calls import Call, RefusedCall, Reply
from millrace.episodes.gateway.sessions import OpenSessions, PendingCall, Session, call_name, closing_reply

WAIT_S = 60.0
REPLY = Reply(id="r", created=1, model="m", text="yes", content="yes", ids=[1])


def nothing() -> None: ...


def sent(session: Session, body: bytes = b"{}", *, repeats: bool = False) -> PendingCall:
    return session.submit(Call(), call_name("/v1", body), repeats=repeats)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_calls_come_in_order_of_arrival() -> None:
    session = Session()
    calls = [sent(session, bytes([num])) for num in range(3)]
    assert [session.next_call(0) for _ in range(4)] == [*calls, None]


def test_the_first_outcome_counts() -> None:
    session = Session()
    pending = sent(session)
    assert pending.answer(REPLY)
    assert not pending.refuse(RefusedCall("no", 500))
    assert pending.outcome is REPLY


def test_a_wait_ends_with_a_call_of_another_thread() -> None:
    session = Session()
    timer = threading.Timer(0.05, lambda: sent(session))
    timer.start()
    assert session.next_call(WAIT_S) is not None
    timer.join()


def test_a_wait_ends_with_wake_and_only_one_wait() -> None:
    session = Session()
    timer = threading.Timer(0.05, session.wake)
    timer.start()
    began_s = time.monotonic()
    assert session.next_call(WAIT_S) is None
    assert time.monotonic() - began_s < WAIT_S
    timer.join()
    pending = sent(session)
    assert session.next_call(0) is pending


def test_wake_comes_before_calls_that_wait() -> None:
    session = Session()
    pending = sent(session)
    session.wake()
    assert session.next_call(0) is None
    assert session.next_call(0) is pending


def test_a_retry_joins_the_running_call_and_then_gets_its_reply() -> None:
    session = Session()
    pending = sent(session)
    assert sent(session, repeats=True) is pending
    pending.answer(REPLY)
    assert sent(session, repeats=True) is pending
    assert (session.counts.calls, session.counts.joined, session.counts.replayed) == (1, 1, 1)
    assert session.next_call(0) is pending
    assert session.next_call(0) is None


def test_a_retry_of_an_unknown_call_is_a_call() -> None:
    session = Session()
    pending = sent(session, repeats=True)
    assert session.next_call(0) is pending


def test_an_equal_body_that_is_no_retry_is_another_call() -> None:
    session = Session()
    assert sent(session) is not sent(session)
    assert session.counts.calls == 2


def test_a_retry_repeats_the_call_that_lost_its_connection() -> None:
    session = Session()
    first, second = sent(session), sent(session)
    for pending in first, second:
        session.watch(pending, nothing)
    session.leave(first, nothing, delivered=False)
    assert not first.awaited and second.awaited
    assert sent(session, repeats=True) is first
    first.answer(REPLY)
    assert sent(session, repeats=True) is first
    session.watch(first, nothing)
    session.leave(first, nothing, delivered=True)
    assert sent(session, repeats=True) is second


def test_an_equal_call_without_the_header_of_a_retry_repeats_only_what_never_arrived() -> None:
    session = Session()
    pending = sent(session)
    session.watch(pending, nothing)
    session.leave(pending, nothing, delivered=False)
    again = sent(session)
    session.watch(again, nothing)
    assert again is pending and sent(session) is not pending, "a connection waits for the reply"
    session.leave(again, nothing, delivered=False)
    pending.answer(REPLY)
    assert sent(session) is pending
    session.watch(pending, nothing)
    session.leave(pending, nothing, delivered=True)
    assert sent(session) is not pending
    assert (session.counts.calls, session.counts.joined, session.counts.replayed) == (3, 1, 1)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413])
def test_a_wait_goes_with_a_status_that_makes_sdks_wait(status: int) -> None:
    with pytest.raises(ValueError, match="no SDK"):
        RefusedCall("busy", status, retry_after_s=1)


@pytest.mark.parametrize("wait_s", [0, 61, 121])
def test_a_wait_is_one_that_every_sdk_obeys(wait_s: int) -> None:
    with pytest.raises(ValueError, match="no SDK"):
        RefusedCall("busy", 503, retry_after_s=wait_s)


def test_a_refused_call_is_tried_again() -> None:
    session = Session()
    pending = sent(session)
    pending.refuse(RefusedCall("busy", 503, retry_after_s=1))
    assert sent(session, repeats=True) is not pending


def test_the_path_and_the_idempotency_key_are_parts_of_the_name() -> None:
    names = {call_name(path, b"{}", key) for path in ("/a", "/b") for key in ("", "k", "l")}
    assert len(names) == 6


def test_kept_replies_are_bounded_in_age_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REPLIES_KEPT_MAX", 2)
    clock = Clock()
    session = Session(clock=clock)
    calls = [sent(session, bytes([num])) for num in range(3)]
    for pending in calls:
        pending.answer(REPLY)
    assert sent(session, bytes([0]), repeats=True) is not calls[0]
    assert sent(session, bytes([2]), repeats=True) is calls[2]
    clock.now_s = sessions.KEPT_S + 1.0
    assert sent(session, bytes([2]), repeats=True) is not calls[2]


def test_too_many_open_calls_are_refused() -> None:
    session = Session(calls_open_max=2)
    sent(session)
    pending = sent(session)
    with pytest.raises(RefusedCall, match="2 calls that wait") as refused:
        sent(session)
    assert refused.value.status == 429
    pending.answer(REPLY)
    sent(session)


def test_conclude_answers_open_and_later_calls() -> None:
    session = Session()
    taken, untaken = sent(session, b"1"), sent(session, b"2")
    settled = threading.Event()
    session.watch(untaken, settled.set)
    assert session.next_call(0) is taken
    last = closing_reply("Enough.")
    session.conclude(last)
    assert settled.is_set()
    assert taken.outcome is untaken.outcome is last
    assert not taken.answer(REPLY)
    assert sent(session, b"3").outcome is last
    assert session.next_call(WAIT_S) is None
    assert (session.counts.calls, session.counts.closed) == (3, 1)


def test_conclude_does_not_change_the_reply_of_an_answered_call() -> None:
    session = Session()
    pending = sent(session)
    pending.answer(REPLY)
    session.conclude(closing_reply())
    assert sent(session, repeats=True).outcome is REPLY


def test_a_closing_reply_has_text_and_no_ids() -> None:
    reply = closing_reply(" ")
    assert reply.content.strip() and reply.content == reply.text
    assert (reply.ids, reply.calls, reply.finish) == ([], (), "stop")


def test_end_refuses_open_and_later_calls() -> None:
    session = Session()
    pending = sent(session)
    session.end()
    session.end()
    assert isinstance(pending.outcome, RefusedCall) and pending.outcome.status == 409
    with pytest.raises(RefusedCall, match="has ended"):
        sent(session)
    assert session.next_call(WAIT_S) is None
    assert not pending.answer(REPLY)


def test_a_session_is_found_by_its_key_among_others() -> None:
    known = OpenSessions()
    session, other = known.open(), known.open()
    assert session.key != other.key
    assert known.find("sk-of-another", session.key) is session
    assert len(known) == 2


@pytest.mark.parametrize(("keys", "words"), [((), "no key"), (("mr-x",), "of no episode")])
def test_an_unknown_key_is_refused(keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(RefusedCall, match=words) as refused:
        OpenSessions().find(*keys)
    assert refused.value.status == 401


def test_the_key_of_an_ended_session_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ENDED_KEYS_MAX", 2)
    clock = Clock()
    known = OpenSessions(clock=clock)

    def statuses(keys: list[str]) -> list[int]:
        found = []
        for key in keys:
            with pytest.raises(RefusedCall) as refused:
                known.find(key)
            found.append(refused.value.status)
        return found

    keys = []
    for _ in range(3):
        session = known.open()
        keys.append(session.key)
        session.end()
    assert statuses(keys) == [401, 409, 409]
    clock.now_s = sessions.KEPT_S + 1.0
    assert statuses(keys) == [401, 401, 401]
    assert len(known) == 0


def test_many_threads_lose_and_double_no_call() -> None:
    session = Session(calls_open_max=1000)
    answered: list[PendingCall] = []

    def play() -> None:
        while (pending := session.next_call(WAIT_S)) is not None:
            assert pending.answer(REPLY)
            answered.append(pending)

    players = [threading.Thread(target=play) for _ in range(4)]
    senders = [
        threading.Thread(target=lambda n=n: [sent(session, b"%d" % n) for _ in range(50)]) for n in range(8)
    ]
    for thread in [*players, *senders]:
        thread.start()
    for thread in senders:
        thread.join(WAIT_S)
    until_s = time.monotonic() + WAIT_S
    while len(answered) < 400 and time.monotonic() < until_s:
        time.sleep(0.01)
    session.end()
    for thread in players:
        thread.join(WAIT_S)
    assert len(answered) == len(set(answered)) == 400
