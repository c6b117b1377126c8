"""The environment pool with several calls of a worker: who is to blame for a death, and what ends."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace

from msgspec.structs import replace

import millrace_sim
from millrace.controller.reward_pool import RewardPool
from millrace.controller.score_requests import ScoreRequests
from millrace.controller.supervisor import PlannedRestart
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.completion.columns import token_array
from millrace.core.errors import WorkerDied
from millrace.core.progress import Vitals
from millrace.core.pulse import Pulse
from millrace.core.types import Finish, Observed, Prompt, Scored, ScoreRequest
from tests.simulation.test_scoring import Answers, _serve


def ask(trajectory_id):
    return ScoreRequest(trajectory_id, trajectory_id, token_array(), Finish.TURN)


class Host:
    """The first worker dies while it answers, and any other one if it makes prompts meanwhile. `ended`: what
    workers were told to forget."""

    def __init__(self):
        self.workers, self.ended = 0, []

    async def spawn(self, name, target, kwargs=None, **how):
        self.workers += 1
        return Worker(name, self.workers, self)


class Worker(Answers):
    suspended = answers = False

    def __init__(self, name, epoch, host):
        self.name, self.epoch, self._host = name, epoch, host
        self.dead = asyncio.get_running_loop().create_future()

    async def call(self, method, *args, timeout_s):
        match method:
            case "prompts" if self.epoch > 1 and self.answers:
                await asyncio.sleep(1.0)
                self.kill()
                await asyncio.sleep(1.0)  # its other calls end too
                raise WorkerDied("killed by its prompts")
            case "prompts":
                return [Prompt(group_id, "row", token_array([1]), "text") for group_id in args[0]]
            case "row_ids":
                return [f"rows:{group_id}" for group_id in args[0]]
            case "forget":
                self._host.ended += args[0]
                return None
        return Vitals(cpu_s=0.0, resident_bytes=0, disk=False, calls=[])

    async def stream(self, method, *args):
        for request in args[0]:
            if self.epoch == 1:
                await asyncio.sleep(1.0)
                self.kill()
            self.answers = True
            done, _ = await asyncio.wait([self.dead], timeout=5.0)
            if done:
                raise WorkerDied("killed by signal 9 (SIGKILL)")
            self.answers = False
            yield request.trajectory_id, Scored(1.0)

    def kill(self):
        if not self.dead.done():
            self.dead.set_result("killed")


def test_a_worker_that_serves_a_suspect_makes_no_prompts():
    async def main():
        found, host = {}, Host()
        pool = RewardPool(
            Pulse(), Waits(), found.__setitem__, next_group_id=0, prefetch=1, timeout_s=60.0, lanes=4
        )

        def is_done():
            while host.workers > 1 and pool.next_prompt() is not None:  # so the next prompts are wanted
                pass
            return len(found) == 2

        for trajectory_id in range(2):
            pool.request(ask(trajectory_id))
        await _serve(host, pool, is_done)
        return found, host.workers

    found, workers = millrace_sim.run(main(), seed=0)
    assert found == {0: Scored(1.0), 1: Scored(1.0)} and workers == 2


def test_a_worker_is_told_which_of_its_episodes_have_ended():
    async def main():
        found, host = {}, Host()
        pool = pool_of(found)
        host.workers = 3
        pool.forget([7])
        pool.request(ask(1))
        await _serve(host, pool, lambda: len(found) == 1)
        return host.ended

    assert millrace_sim.run(main(), seed=0) == [7]


def test_a_request_begins_its_call_and_wakes_no_session():
    async def main():
        pool, worker = pool_of({}), Worker("here", 2, Host())
        session = asyncio.create_task(pool.session(worker))
        await asyncio.sleep(1.0)
        pool.request(ask(0))
        begun = pool.num_busy, [*pool._idle]
        session.cancel()
        await asyncio.wait([session])
        return begun

    assert millrace_sim.run(main(), seed=0) == (1, ["here"])


def test_a_worker_with_a_failed_call_begins_no_other():
    class IsLate(Worker):
        async def stream(self, method, *args):
            [request] = args[0]
            await asyncio.sleep(1000.0 if request.trajectory_id == 0 else 1.0)
            yield request.trajectory_id, Scored(1.0)

        def kill(self):  # its death takes a while
            self.more = asyncio.create_task(ask_more())

    async def ask_more():
        for trajectory_id in range(1, 5):
            await asyncio.sleep(0)
            pool.request(ask(trajectory_id))

    async def main():
        session = asyncio.create_task(pool.session(IsLate("here", 2, Host())))
        pool.request(ask(0))
        await asyncio.wait([session])
        await asyncio.sleep(1.0)
        return [*found], pool.num_requests, type(session.exception())

    pool = pool_of(found := {})
    assert millrace_sim.run(main(), seed=0) == ([0], 4, PlannedRestart)


def pool_of(found):
    return RewardPool(
        Pulse(), Waits(), found.__setitem__, next_group_id=0, prefetch=0, timeout_s=60.0, lanes=4
    )


class Named:
    """A worker that lives."""

    dead = SimpleNamespace(done=lambda: False)

    def __init__(self, name):
        self.name = name


def test_what_ended_elsewhere_leaves_nothing_and_its_worker_ends_it():
    requests, here, other = ScoreRequests(lanes=4), Named("here"), Named("other")
    for trajectory_id in range(3):
        requests.put(ask(trajectory_id))
        assert requests.take(here) == [ask(trajectory_id)]
        requests.answered("here", trajectory_id, Observed([1]))
        requests.give_back("here", [])
    requests.put(ask(1))
    requests.forget([0, 1])  # by a decision: one between its turns, one that waits for an answer
    assert not len(requests) and not requests.take(here)
    assert requests.ended("other") == [] and requests.ended("here") == [0, 1] and requests.ended("here") == []
    requests.told("here")
    assert requests._homes == {2: "here"}
    requests.forget([2])
    requests.left("here")  # any worker may remove its snapshots
    assert requests.ended("other") == [2] and not requests._homes and not requests._ended
    assert not requests.take(other)


def test_a_suspect_that_has_ended_keeps_no_worker_for_itself():
    requests, here = ScoreRequests(lanes=4), Named("here")
    for trajectory_id in range(2):
        requests.put(ask(trajectory_id))
        requests.take(here)
        assert not requests.died("here", trajectory_id)
    requests.left("here")
    requests.forget([0, 1])
    requests.put(ask(2))
    assert requests.take(Named("next")) == [ask(2)] and not requests.is_alone("next")


def test_a_request_that_kills_its_worker_alone_twice_has_failed():
    requests = ScoreRequests(lanes=4)
    requests.put(ask(0))
    outcomes = []
    for name in ("a", "b", "c"):
        assert requests.take(Named(name)) == [ask(0)]
        outcomes.append(requests.died(name, 0))
        requests.left(name)
    assert outcomes == [False, False, True]


def test_an_episode_that_begins_again_and_kills_its_workers_has_failed():
    requests, deaths = ScoreRequests(lanes=4), []
    requests.put(ask(0))
    for name in ("a", "b", "c"):
        worker = Named(name)
        assert requests.take(worker) == [ask(0)]
        if deaths:  # the agent that this worker starts asks something else, and its turn is the next request
            requests.answered(name, 0, Observed(token_array([5]), begins=True))
            requests.give_back(name, [])
            requests.put(ask(1))
            requests.put(ask(0))
            assert requests.take(worker) == [ask(0)] and requests.take(worker) == []  # alone
            requests.forget([1])
        deaths.append(requests.died(name, 0))
        requests.left(name)
    assert deaths == [False, False, True]


def test_a_worker_with_a_suspect_begins_no_prompt_before_it():
    """Also with one whose episode began again on this worker."""
    requests, here = ScoreRequests(lanes=4), Named("here")
    requests.put(ask(0))
    requests.take(here)
    requests.died("lost", 0)
    assert requests.may_begin(here)
    requests.answered("here", 0, Observed(token_array([5]), begins=True))
    requests.give_back("here", [])
    requests.put(ask(0))
    assert not requests.may_begin(here) and requests.may_begin(Named("other"))


def whole(trajectory_id=0, *, turns=1):
    """The request of a trajectory after so many turns of two tokens, with answers of one token between."""
    stretches = [
        stretch for n in range(0, 3 * turns, 3) for stretch in ((n, n + 2, True), (n + 2, n + 3, False))
    ]
    tokens = token_array(range(3 * turns - 1))
    extras = {"prompt": token_array([7]), "logprobs": array("f", tokens)}
    return replace(ask(trajectory_id), tokens=tokens, turns=stretches[:-1], **extras)


def test_only_the_new_turn_goes_to_the_worker_that_has_the_episode():
    requests, here, other = ScoreRequests(lanes=4), Named("here"), Named("other")
    requests.put(whole())
    assert requests.take(here) == [whole()] and requests.short("here", whole()) == whole()
    requests.answered("here", 0, Observed(token_array([2])))
    requests.give_back("here", [])
    second = whole(turns=2)
    requests.put(second)
    assert requests.take(here) == [second]
    short = requests.short("here", second)
    assert (short.known, list(short.tokens), list(short.logprobs)) == (3, [3, 4], [3.0, 4.0])
    assert short.turns == [(3, 5, True)] and not short.prompt and short.room == second.room
    assert requests.short("other", second) == second
    requests.restart(0)  # from its prompt: the worker has another episode
    assert requests.short("here", second) == second
    requests.left("here")
    assert requests.take(other) == [second] and requests.short("other", second) == second


def test_a_worker_without_the_episode_gets_all_of_its_request():
    class Forgets(Worker):
        async def answer(self, request):
            heard.append(request.known)
            if request.known is not None:
                return None
            return Observed(token_array([2])) if len(request.turns) == 1 else Scored(1.0)

    async def main():
        session = asyncio.create_task(pool.session(Forgets("here", 2, Host())))
        for turns in (1, 2):
            pool.request(whole(turns=turns))
            await asyncio.sleep(1.0)
        session.cancel()
        await asyncio.wait([session])

    heard, pool = [], pool_of(found := {})
    millrace_sim.run(main(), seed=0)
    assert heard == [None, 3, None] and found == {0: Scored(1.0)}


def test_agents_started_for_a_prompt_that_is_not_taken_are_closed():
    async def main():
        host, news = Host(), Pulse()
        host.workers = 3
        pool = RewardPool(
            news, Waits(), lambda *_: None, next_group_id=0, prefetch=2, timeout_s=60.0, lanes=4, group_size=8
        )

        def is_done():
            while (prompt := pool.next_prompt()) is not None:
                pool.skip(prompt.group_id)
            return len(host.ended) >= 16

        await _serve(host, pool, is_done)
        return sorted(host.ended[:16])

    assert millrace_sim.run(main(), seed=0) == [*range(16)]


class Begins(Worker):
    """Begins an episode in ten seconds, and says so in `heard`."""

    async def answer(self, request):
        self._host.heard.append((clock.now(), self.name, request.trajectory_id))
        await asyncio.sleep(10.0)
        return Observed(token_array([request.trajectory_id]), begins=True)


def begin(trajectory_id):
    return replace(ask(trajectory_id), begins=True)


def test_the_other_agents_of_a_group_start_with_its_prompt_and_their_trajectories_wait_no_more():
    async def main():
        host = SimpleNamespace(ended=[], heard=[])
        pool = ahead_of(found := {})
        first, second = (asyncio.create_task(pool.session(Begins(name, 2, host))) for name in "ab")
        await asyncio.sleep(5.0)  # they are starting
        assert pool.next_prompt().group_id == 0 and pool.request(begin(1)) is None
        await asyncio.sleep(6.0)
        begun = pool.request(begin(2))
        assert found == {1: Observed(token_array([1]), begins=True)}  # nobody waits for the others
        assert (begun.answer.tokens, begun.took_s) == (token_array([2]), 10.0)
        starts = [(at_s, tid) for at_s, _, tid in host.heard if tid < 4]
        [lost_with] = {name for _, name, tid in host.heard if tid == 3}
        (first if lost_with == "a" else second).cancel()  # its worker is gone before anybody wanted it
        await asyncio.sleep(11.0)
        assert pool.request(begin(3)).answer.tokens == token_array([3])
        assert heard(host) == [1, 2, 3, 3]
        assert pool.request(begin(3)) is None  # once more: it has begun before, and lost its episode
        await asyncio.sleep(11.0)
        for session in first, second:
            session.cancel()
        await asyncio.wait([first, second])
        return starts, heard(host), {*found}

    def heard(host):  # of the first group
        return [tid for _, _, tid in host.heard if tid < 4]

    starts, begun, found = millrace_sim.run(main(), seed=0)
    assert starts == [(0.0, 1), (0.0, 2), (0.0, 3)] and begun == [1, 2, 3, 3, 3] and found == {1, 3}


class BeginsWithThePrompt(Begins):
    async def call(self, method, *args, timeout_s):
        if method == "prompts":
            await asyncio.sleep(4.0)
        return await super().call(method, *args, timeout_s=timeout_s)


def test_the_start_of_an_agent_counts_from_its_group_s_prompt():
    async def main():
        pool = ahead_of({})
        session = asyncio.create_task(pool.session(BeginsWithThePrompt("a", 2, SimpleNamespace(heard=[]))))
        await asyncio.sleep(15.0)
        took_s = pool.request(begin(1)).took_s
        session.cancel()
        await asyncio.wait([session])
        return took_s

    assert millrace_sim.run(main(), seed=0) == 14.0


def test_the_agents_that_have_started_are_asked_before_other_groups_start():
    """They have the lanes of their group's prompt."""

    async def main():
        host = SimpleNamespace(heard=[])
        session = asyncio.create_task(ahead_of({}, prefetch=9).session(BeginsWithThePrompt("a", 2, host)))
        await asyncio.sleep(20.0)
        session.cancel()
        await asyncio.wait([session])
        return [at_s for at_s, _, trajectory_id in host.heard if trajectory_id < 4]

    assert millrace_sim.run(main(), seed=0) == [4.0] * 3


def test_an_episode_that_begins_again_counts_from_then():
    """The first member of a group, before its first answer."""
    requests, here = ScoreRequests(lanes=4), Named("here")
    requests.begun("here", range(4), 10.0)
    assert requests.restart(0) == "here"
    assert (requests.since(0, 50.0), requests.since(1, 50.0)) == (50.0, 10.0)
    requests.put(begin(2))
    assert requests.take(here) == [begin(2)]
    requests.left("here")
    assert requests.since(2, 50.0) == 50.0


def ahead_of(found, prefetch=1):
    return RewardPool(
        Pulse(),
        Waits(),
        found.__setitem__,
        next_group_id=0,
        prefetch=prefetch,
        timeout_s=60.0,
        lanes=4,
        group_size=4,
        room=99,
    )
