"""The staleness book, against brute force."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from millrace.schedule.deadlines import NO_LIMIT, Deadlines, choose, overdue
from millrace.schedule.view import GroupView, View


def view(groups=(), *, version=0, batch_groups=2):
    return View(
        version=version,
        newest=version,
        pullable=(version,),
        steps_left=100,
        batch_groups=batch_groups,
        group_size=2,
        max_sequence_tokens=16,
        groups=tuple(groups),
        replicas=(),
    )


def feasible(births, *, version, batch_groups, bound):
    """Earliest deadline first, played out step by step."""
    deadlines = sorted(birth + bound for birth in births)
    while deadlines:
        batch, deadlines = deadlines[:batch_groups], deadlines[batch_groups:]
        if batch[0] < version:
            return False
        version += 1
    return True


births = st.lists(st.integers(0, 6), max_size=12)


@given(births, st.integers(1, 3), st.integers(0, 4))
def test_feasible_means_that_earliest_deadline_first_trains_all_in_time(births, batch_groups, bound):
    groups = [GroupView(i, birth) for i, birth in enumerate(births)]
    look = view(groups, version=4, batch_groups=batch_groups)
    expected = feasible(births, version=4, batch_groups=batch_groups, bound=bound)
    assert Deadlines(look, bound, look.births).feasible == expected


@given(births, st.integers(0, 6), st.integers(1, 3), st.integers(0, 4))
def test_room_is_how_many_more_groups_stay_feasible(births, birth, batch_groups, bound):
    book = Deadlines(view(version=4, batch_groups=batch_groups), bound)
    for other in births:
        if book.places_left(other):
            book.add(other)
    kept = [b for b in births if b + bound >= 4]
    fitting = []
    for b in kept:  # the same greedy admission, by brute force
        if feasible([*fitting, b], version=4, batch_groups=batch_groups, bound=bound):
            fitting.append(b)
    room = book.places_left(birth)
    more = [birth] * room
    assert feasible([*fitting, *more], version=4, batch_groups=batch_groups, bound=bound)
    assert not feasible([*fitting, *more, birth], version=4, batch_groups=batch_groups, bound=bound)


@given(births, st.data(), st.integers(1, 3), st.integers(0, 4))
def test_the_batch_is_the_first_in_order_that_leaves_the_rest_feasible(births, data, batch_groups, bound):
    kept = []
    for birth in births:
        if feasible([*kept, birth], version=4, batch_groups=batch_groups, bound=bound):
            kept.append(birth)
    groups = [
        GroupView(i, birth, 0 if data.draw(st.booleans(), label="ready") else None)
        for i, birth in enumerate(kept)
    ]
    ready = [group for group in groups if group.ready]
    look = view(groups, version=4, batch_groups=batch_groups)
    expected = None
    for batch in combinations(ready, batch_groups):
        rest = [group.birth for group in groups if group not in batch]
        if feasible(rest, version=5, batch_groups=batch_groups, bound=bound):
            expected = list(batch)
            break
    assert choose(look, bound, groups, ready) == expected


@given(births, st.integers(1, 3), st.integers(0, 4))
def test_as_few_groups_as_possible_are_given_up(births, batch_groups, bound):
    groups = [GroupView(i, birth) for i, birth in enumerate(births)]
    gone = overdue(view(groups, version=4, batch_groups=batch_groups), bound)
    rest = [group.birth for group in groups if group.group_id not in gone]
    assert feasible(rest, version=4, batch_groups=batch_groups, bound=bound)
    if gone:
        larger = combinations(births, len(rest) + 1)
        assert not any(feasible(s, version=4, batch_groups=batch_groups, bound=bound) for s in larger)


def test_equal_births_give_the_formula_of_areal():
    # N_r <= B (i + eta + 1): at version 3 with 2 x 3 trained, eta 2 allows 2 (3 + 2 + 1) - 6 = 6 live.
    assert Deadlines(view(version=3), 2).places_left(3) == 6


def test_a_bound_of_zero_allows_one_batch_of_the_present_version_and_none_of_an_older():
    book = Deadlines(view(version=3), 0)
    assert (book.places_left(3), book.places_left(2)) == (2, 0)


def test_older_births_take_places_from_younger_ones_but_not_the_reverse():
    # Version 4, B = 2, S = 1: deadline 4 has 2 places, deadline 5 has 4 in all.
    book = Deadlines(view(version=4), 1)
    for _ in range(3):
        book.add(4)
    assert (book.places_left(3), book.places_left(4)) == (1, 1)
    book.add(3)
    assert (book.places_left(3), book.places_left(4)) == (0, 0)


def test_without_a_bound_everything_fits_and_nothing_is_overdue():
    look = view([GroupView(0, -100)], version=9)
    assert Deadlines(look, None, look.births).places_left(0) == NO_LIMIT
    assert overdue(look, None) == []


def test_ready_groups_are_kept_before_unready_ones():
    groups = [GroupView(0, 3), GroupView(1, 3, 0), GroupView(2, 3, 1), GroupView(3, 1)]
    assert overdue(view(groups, version=4), 1) == [0, 3]
