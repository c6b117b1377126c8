"""LlamaRL's problems (6) and (7): values worked by hand, and the paper's theorem."""

from dataclasses import replace

import pytest

from millrace.core.errors import ConfigError
from millrace_sim.plan.theory import Problem, solve_asynchronous, solve_synchronous, theta_star

# Weights of 2 and memory of 10: the trainer (8 + 1 a sample) fits 2 samples on one device, generation
# (2 + 2 a sample) 4. Together (10 + b_t + 2 b_g) they need two devices.
HAND = Problem(
    samples=16,
    devices=8,
    memory=10,
    weights=2,
    activations=1,
    kv=2,
    train_s=lambda batch, m: 1 + 2 / batch,
    generate_s=lambda batch, m: 2 + 8 / batch,
)


def test_the_asynchronous_optimum_is_the_one_worked_by_hand():
    best = solve_asynchronous(HAND)
    # eta_t(2) m_t = 2 and eta_g(4) m_g = 4 on one device each; T = 16/8 (2 + 4), theta = 2/6. Two devices
    # would allow larger batches, at twice the cost: 2 (1 + 2/12) and 2 (2 + 8/9).
    assert (best.train.batch, best.train.model_parallel, best.train.cost) == (2, 1, 2)
    assert (best.generate.batch, best.generate.model_parallel, best.generate.cost) == (4, 1, 4)
    assert best.step_s == 12
    assert best.theta == pytest.approx(1 / 3)


def test_the_synchronous_optimum_is_the_one_worked_by_hand():
    best = solve_synchronous(HAND)
    # m = 2: b_t + 2 b_g <= 10. (4, 3): 2 (1.5 + 2 + 8/3) = 12.33; (2, 4): 2 (2 + 4) = 12 is the least.
    assert (best.model_parallel, best.train_batch, best.generate_batch) == (2, 2, 4)
    assert best.step_s == pytest.approx(16 / 8 * 12)


def test_at_theta_star_both_sides_take_equally_long():
    theta = theta_star(2, 4)
    assert 2 / theta == pytest.approx(4 / (1 - theta)) == pytest.approx(2 + 4)


@pytest.mark.parametrize("devices", [2, 8, 64])
@pytest.mark.parametrize(("activations", "kv"), [(1, 2), (0.1, 0.5), (4, 0.2)])
def test_asynchronous_is_strictly_better_on_the_same_devices(devices, activations, kv):
    problem = replace(HAND, devices=devices, activations=activations, kv=kv, memory=16)
    assert solve_asynchronous(problem).step_s < solve_synchronous(problem).step_s


def test_with_costs_that_no_batch_size_changes_only_the_memory_of_model_copies_differs():
    flat = replace(HAND, train_s=lambda batch, m: 1.0, generate_s=lambda batch, m: 2.0, memory=100)
    assert solve_asynchronous(flat).step_s == pytest.approx(solve_synchronous(flat).step_s)


def test_a_model_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(ConfigError, match="cannot hold"):
        solve_synchronous(replace(HAND, devices=1))
    with pytest.raises(ConfigError, match="cannot hold"):
        solve_asynchronous(replace(HAND, memory=1, devices=4))
