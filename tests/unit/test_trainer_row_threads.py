"""Rows on several threads: the bits of one thread, and an error that ends all of them."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from tests.long import few
from trainer_doubles import make_batch, make_trainer, tiny_model, weights_of

from millrace.config.tables.training import Optimizer
from millrace.core.errors import TrainingError
from millrace.trainer.kernels.row_threads import RowThreads, row_threads
from millrace.trainer.model import recompute_layers

LR = Optimizer(lr=3e-3)


def stepped(tmp_path, threads, *, recompute=False, **changes):
    trainer = make_trainer(None, optimizer=LR, **changes)
    trainer._rows = RowThreads(40, threads)
    if recompute:
        recompute_layers(trainer.model)
    result = trainer.step(make_batch(groups=6), rejected_dir=tmp_path)
    return weights_of(trainer), result


BFLOAT16 = {"dtype": torch.bfloat16, "published": torch.bfloat16}


@pytest.mark.parametrize(
    "settings", few([{"minibatches": 2, "epochs": 2}, BFLOAT16, {"recompute": True}, {}], 2), ids=str
)
def test_a_step_on_several_threads_has_the_bits_of_one_thread(tmp_path, settings):
    (weights, one), (others, several) = (stepped(tmp_path, threads, **settings) for threads in (1, 3))
    assert one.metrics["micro_batches"] >= 6
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert one.metrics == several.metrics
    assert one.logprob_gap == several.logprob_gap


def test_rows_add_in_their_order_whichever_is_ready_first():
    """The second row is ready first: it waits."""
    weight, first_may_add = torch.zeros(3, requires_grad=True), threading.Event()
    order = []
    weight.register_post_accumulate_grad_hook(lambda _: order.append(weight.grad.clone()))

    def work(row):
        if row == 0:
            assert first_may_add.wait(60)
        else:
            first_may_add.set()
        (weight * (1.0 + row)).sum().backward()
        return row

    assert RowThreads(1, 2).run(work, [0, 1, 2, 3], [weight]) == [0, 1, 2, 3]
    assert [grad[0].item() for grad in order] == [1.0, 3.0, 6.0, 10.0]


def test_a_parameter_that_a_row_does_not_use_keeps_no_row_waiting():
    used, unused = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)

    def work(row):
        ((used if row % 2 else unused) * 2.0).sum().backward()

    RowThreads(1, 2).run(work, range(6), [used, unused])
    assert (used.grad.item(), unused.grad.item()) == (6.0, 6.0)


def test_the_first_error_is_raised_and_rows_behind_it_end():
    weight = torch.zeros(1, requires_grad=True)

    def work(row):
        if row == 1:
            raise TrainingError("row 1")
        (weight * 1.0).sum().backward()

    with pytest.raises(TrainingError, match="row 1"):
        RowThreads(1, 3).run(work, range(5), [weight])
    assert not weight._backward_hooks


class Large(torch.nn.Linear):
    device = torch.device("cpu")


def test_a_small_model_keeps_whole_micro_batches_on_one_thread(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    tiny = tiny_model()
    apart = 10**8 // tiny.num_parameters()
    assert row_threads(tiny, 8192) == RowThreads(8192, 1, 4, full=8192, apart=apart)
    large, more = Large(5000, 6000, bias=False), {"in_turn": True, "apart": 3}
    assert row_threads(large, 8192) == RowThreads(1111, 4, 1, full=1111, **more)
    assert row_threads(large, 8192, several=False) == RowThreads(1111, 1, 4, full=1111, **more)
    assert row_threads(large, 8192, alone=False) == RowThreads(8192, apart=sys.maxsize)
    assert row_threads(large, 512) == RowThreads(512, 1, 4, full=512, **more)
