"""How far generation runs ahead, and which groups a batch passes over."""

import pytest

from millrace.controller.state.trajectories import FILLING, MEMORY, RunAverages
from millrace.schedule import GroupView, ReplicaView, View
from millrace.schedule.ahead import AHEAD_MAX, RESERVE, Ahead
from millrace.schedule.take import FirstReady, InOrder


def view(
    *groups,
    replicas=8,
    version=3,
    newest=3,
    batch_groups=4,
    reached=-1,
    group_duration_batches=2.0,
    staleness=None,
    redundant=0,
):
    return View(
        version=version,
        newest=newest,
        pullable=(newest,),
        steps_left=100,
        batch_groups=batch_groups,
        group_size=2,
        max_sequence_tokens=16,
        groups=groups,
        replicas=tuple(ReplicaView(f"r{index}", newest) for index in range(replicas)),
        reached=reached,
        group_duration_batches=group_duration_batches,
        staleness=staleness,
        redundant_groups=redundant,
    )


def groups(*, ready, unready=()):
    return [
        *(GroupView(group_id, 0, rank) for rank, group_id in enumerate(ready)),
        *(GroupView(group_id, 0) for group_id in unready),
    ]


# ---------------------------------------------------------------- how far ahead


def test_as_many_batches_are_under_way_as_are_trained_while_a_group_is_generated():
    # The trainer has just taken a batch (version 4, weights 3): what starts now is one version old already.
    assert Ahead(None).wanted_groups_max(view(version=4, group_duration_batches=2.0)) == 4 * RESERVE * 2.0
    assert Ahead(None).wanted_groups_max(view(version=3, group_duration_batches=2.0)) == 4 * (
        RESERVE * 2.0 + 1
    )


@pytest.mark.parametrize(
    "bound, replicas, group_duration_batches, batches",
    [
        (4, 8, 0.1, 1),  # the trainer is slower by far, and one batch is enough
        (4, 8, 50.0, 2.5),  # half of the bound is left to stragglers
        (1, 8, 50.0, 1),
        (0, 8, 50.0, 0),  # synchronous
        (2, 1, 50.0, 1),  # a single replica starts whole batches
        (2, 2, 50.0, 1.5),
        (4, 1, 50.0, 2),
        (None, 3, 50.0, AHEAD_MAX),
        (4, 0, 50.0, 2),  # while no replica is up
    ],
)
def test_the_batches_stay_within_one_and_half_of_the_bound(bound, replicas, group_duration_batches, batches):
    at_once = view(version=4, newest=3, replicas=replicas, group_duration_batches=group_duration_batches)
    assert Ahead(bound).wanted_groups_max(at_once) == 4 * batches


def test_a_configured_number_is_obeyed_within_the_bound():
    training = view(version=4, newest=3, replicas=1)
    assert Ahead(4, 3.0).wanted_groups_max(training) == 12
    assert Ahead(2, 3.0).wanted_groups_max(training) == 8


def test_with_an_idle_trainer_a_batch_can_always_start():
    for bound in (0, 1, 2, 4, None):
        assert Ahead(bound).wanted_groups_max(view(replicas=1)) >= 4


@pytest.mark.parametrize(
    "bound, staleness, batches",
    [
        (2, None, 1),  # nothing was trained yet
        (2, 1.0, 1),  # as old as wanted
        (2, 0.99, 1),  # nearly
        (2, 1.6, 1),
        (2, 0.855, 1.5),  # younger: the trainer waits for groups
        (2, 0.0, 2),  # never beyond the bound
        (1, 0.5, 1),
        (0, 0.0, 0),
        (None, 0.0, 4 * 0.98 + 1),
    ],
)
def test_data_that_is_younger_than_wanted_lets_admission_go_on(bound, staleness, batches):
    at_once = view(
        version=4, newest=3, replicas=1, group_duration_batches=0.5, staleness=staleness, batch_groups=40
    )
    assert Ahead(bound).wanted_groups_max(at_once) == pytest.approx(40 * batches, abs=1)


def test_measurements_forget():
    measured = RunAverages()
    assert measured.group_duration_batches == 1.0 and measured.staleness is None
    measured.step.add(2.0)
    measured.group.add(10.0)
    for _ in range(FILLING):
        measured.batch_trained(0.0)
    assert measured.group_duration_batches == 5.0 and measured.staleness is None
    for _ in range(8 * MEMORY):
        measured.group.add(4.0)
        measured.batch_trained(1.5)
    assert measured.group_duration_batches == pytest.approx(2.0, rel=1e-2)
    assert measured.staleness == pytest.approx(1.5, rel=1e-2)


# ---------------------------------------------------------------- in order


def wanted(*, ready, unready=(), **of_view):
    live = groups(ready=ready, unready=unready)
    ranked = InOrder().ranked(view(*live, replicas=4, **of_view), live[: len(ready)])
    return [group.group_id for group in ranked]


def test_groups_are_trained_as_the_stream_has_them():
    assert wanted(ready=[5, 2, 4, 3]) == [2, 3, 4, 5]


def test_a_batch_passes_over_few_groups_that_are_not_ready():
    # B = 4 on four replicas: one may be passed over, and nothing is wanted behind a second one.
    assert wanted(ready=[0, 2, 3, 4], unready=[1]) == [0, 2, 3, 4]
    assert wanted(ready=[0, 2, 3, 5], unready=[1, 4]) == [0, 2, 3]


def test_a_batch_passes_over_redundant_groups_besides():
    assert wanted(ready=[0, 2, 3, 5], unready=[1, 4], redundant=1) == [0, 2, 3, 5]
    assert wanted(ready=[0, 2, 3, 7], unready=[1, 4, 6], redundant=1) == [0, 2, 3]


def test_redundant_groups_start_on_top():
    assert Ahead(0).wanted_groups_max(view(redundant=3)) == 4 + 3


def test_as_many_more_are_passed_over_as_are_taken_up_again():
    # 1 was passed over before (the stream has come to 4): it makes room for another.
    assert wanted(ready=[1, 6, 8, 9], unready=[5, 7], reached=4) == [1, 6, 8, 9]
    assert wanted(ready=[6, 8, 9, 10], unready=[5, 7], reached=4) == [6]


def test_those_passed_over_do_not_fill_a_batch_while_others_are_ready():
    assert wanted(ready=[0, 1, 2, 3, 5, 6, 7, 8], reached=4)[:4] == [0, 5, 6, 7]
    assert wanted(ready=[0, 1, 2, 5], reached=4) == [0, 1, 2, 5], "unless nothing else is ready"
    assert wanted(ready=[0, 1, 2, 6, 8, 9], unready=[5, 7], reached=4)[:4] == [0, 1, 6, 8]


def test_with_all_groups_ready_all_are_wanted():
    assert sorted(wanted(ready=range(12), reached=4)) == list(range(12))
    assert len(FirstReady().ranked(view(), groups(ready=range(12)))) == 12
