"""Which row a group gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.tasks.order import row_of


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 2**40))
def test_every_epoch_visits_every_row_once(rows, epoch, seed):
    visited = [row_of(epoch * rows + position, rows, seed) for position in range(rows)]
    assert sorted(visited) == list(range(rows))


def test_epochs_and_seeds_give_other_orders():
    def order(epoch: int, seed: int) -> list[int]:
        return [row_of(epoch * 50 + position, 50, seed) for position in range(50)]

    assert len({tuple(order(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_the_order_is_a_fixed_function_of_its_arguments():
    assert [row_of(group, 10, 0) for group in range(10)] == [5, 9, 1, 6, 4, 2, 3, 7, 0, 8]


@pytest.mark.parametrize("rows", [10**9 + 7, 2**52])
def test_a_huge_data_set_needs_no_memory(rows):
    assert 0 <= row_of(3 * rows + 12345, rows, 1) < rows
