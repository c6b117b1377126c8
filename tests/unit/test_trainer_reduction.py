from __future__ import annotations

import numpy as np
import pytest

from millrace.trainer.batch.flat_batch import token_weights

MASKS = [np.array([True, True, False, True]), np.array([True]), np.array([False, False])]


@pytest.mark.parametrize(
    ("normalize", "weights"),
    [
        ("sequence", [[1 / 9, 1 / 9, 0, 1 / 9], [1 / 3], [0, 0]]),  # 3 sequences, of 3, 1 and 0 tokens
        ("token", [[1 / 4, 1 / 4, 0, 1 / 4], [1 / 4], [0, 0]]),  # 4 tokens
        ("max_tokens", [[1 / 30, 1 / 30, 0, 1 / 30], [1 / 30], [0, 0]]),  # 3 sequences of at most 10
    ],
)
def test_weights_worked_by_hand(normalize, weights):
    found = token_weights(MASKS, normalize, max_tokens=10)
    for one, other in zip(found, weights, strict=True):
        np.testing.assert_allclose(one, other)


def test_a_batch_without_a_trained_token_has_zero_weights():
    assert token_weights([np.array([False])], "token", max_tokens=1)[0].tolist() == [0.0]
