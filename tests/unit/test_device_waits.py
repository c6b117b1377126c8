"""Inside a micro-batch or a decode step the host does not wait for the device, and launches little."""

from __future__ import annotations

from functools import partial

import launches
import pytest
import torch
from engine_models import CONFIGS, make_engine, make_model, make_work, prompt_of
from test_algorithms_presets import PRESETS, large_batch
from test_trainer_adapter import with_adapter
from tests.device_watch import META, DeviceWatch, HostReads, meta_as_gpu, trained_as_on_gpu, watched
from tests.long import covering
from trainer_doubles import CONFIGS as TRAINED
from trainer_doubles import choosing, make_batch, make_trainer, tiny_model

from millrace.core.supported import SINKS, TORCH_ENGINE
from millrace.core.types import Sampling
from millrace.engines.own import sampler
from millrace.engines.own.accelerated import flash
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.sampler import DIRECT_VOCAB_MAX, TokenSampler
from millrace.engines.own.sampling_options import Edits
from millrace.trainer import model as trainer_model
from millrace.trainer.kernels import on_gpu

ROWS, POSITIONS = 8, 128
DECODE_LAUNCHES_MAX = {"decode": 8, "mixtures": 13}
TRAINING_LAUNCHES_MAX = 60


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), x[0]),
        lambda x: x.long().bincount(),
        lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([2, 2])),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 0])),
        lambda x: x.to(META),
        lambda x: torch.zeros(4, device=META).copy_(x),
        lambda x: torch.tensor([1.0], device=META),
    ],
)
def test_the_watch_sees_what_waits(compute):
    assert watched(partial(compute, torch.ones(4))).waits


def test_the_watch_lets_pass_what_does_not_wait():
    x = torch.ones(4)
    assert not watched(lambda: x.to(META, non_blocking=True)[:2].mul_(2.0).sum()).waits


MIXTURES = [name for name, config in TRAINED.items() if hasattr(config, "num_experts_per_tok")]


def _composed(config) -> bool:
    return getattr(config, "attn_logit_softcapping", None) is not None or config.model_type in SINKS


def micro_batch(trainer, batch, progress, dtype=torch.float32) -> DeviceWatch:
    """The gradient of a row, with the model on `meta`."""
    prepared = trainer._prepared(batch, 1)
    trainer.model.to(META, dtype)
    if trainer.value_head is not None:
        trainer.value_head.to(META)
    row = prepared.rows[0][0]
    with meta_as_gpu() as patch:
        patch.setattr(trainer_model, "serves", lambda device, dtype, config: not _composed(config))
        return watched(lambda: trainer._backward(row, prepared.flat, progress, first=True))


@pytest.mark.parametrize(("kind", "progress"), covering(PRESETS, [0.0, 0.5]))
def test_a_micro_batch_of_every_preset_waits_for_nothing(kind, progress):
    trainer = make_trainer(PRESETS[kind](), max_tokens=20, epochs=2)
    assert micro_batch(trainer, large_batch(), progress).waits == []


def test_a_micro_batch_over_allowed_tokens_waits_for_nothing():
    assert micro_batch(make_trainer(), choosing(make_batch()), 0.0).waits == []


@pytest.mark.parametrize("family", MIXTURES)
def test_a_micro_batch_of_a_mixture_waits_for_nothing(family, monkeypatch):
    monkeypatch.setattr(on_gpu, "has_grouped", lambda device, dtype, shapes: device == META)
    trainer = make_trainer(model=tiny_model(family))
    on_gpu.install_experts(trainer.model)
    assert micro_batch(trainer, make_batch(), 0.0, torch.bfloat16).waits == []


@pytest.mark.parametrize("family", [name for name in TRAINED if name not in MIXTURES])
def test_a_micro_batch_of_every_family_waits_for_nothing(family):
    assert micro_batch(make_trainer(model=tiny_model(family)), make_batch(), 0.0).waits == []


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapted"])
@pytest.mark.parametrize("family", TRAINED)
def test_a_micro_batch_in_bfloat16_of_every_family_waits_for_nothing(family, adapted):
    model = tiny_model(family)
    if adapted and family not in MIXTURES:
        with_adapter(model, published=torch.bfloat16)
    with trained_as_on_gpu(model.to(META)) as watch:
        trainer = make_trainer(model=model, dtype=torch.bfloat16, published=torch.bfloat16)
        prepared = trainer._prepared(make_batch(), 1)
        with watch, trainer._serving():
            trainer._backward(prepared.rows[0][0], prepared.flat, 0.0, first=True)
    assert watch.waits == [] and watch.launches


@pytest.mark.parametrize("kind", ["training", "lora"])
def test_a_layer_of_a_step_of_the_trainer_launches_few_operations(kind):
    found = launches.figures(kind)
    assert found[f"{kind}_launches_a_layer"] <= TRAINING_LAUNCHES_MAX, found[kind]


def steps_of(name, device):
    shape = architecture_of(CONFIGS[name])
    return launches.recorded_steps(shape, device, slots=2 * ROWS, positions=POSITIONS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decode_step_of_every_family_waits_for_nothing(name):
    steps, weights = steps_of(name, META)
    assert watched(lambda: steps.logits(weights, ROWS)).waits == []


@pytest.mark.parametrize("kind", DECODE_LAUNCHES_MAX)
def test_a_layer_of_a_decode_step_launches_few_operations(kind):
    found = launches.figures(kind)
    assert found[f"{kind}_launches_a_layer"] <= DECODE_LAUNCHES_MAX[kind], found[kind]


def test_the_launches_of_every_family_that_the_engine_runs_are_counted():
    counted = {launches.MODELS[name][0] for kind in DECODE_LAUNCHES_MAX for name in launches.KINDS[kind]}
    assert counted == set(TORCH_ENGINE.families)


def test_a_recorded_step_is_the_same_operations_whatever_the_tokens_and_lengths(monkeypatch):
    monkeypatch.setattr(flash, "flash_attention", lambda q, keys, values, where, *, window: q.clone())
    steps, weights = steps_of("qwen3 tied", torch.device("cpu"))
    seen = []
    for tokens, positions in (([3, 1, 4, 1, 5], [0, 9, 2, 6, 5]), ([2, 7], [99, 120])):
        steps.place(tokens, positions)
        seen.append(watched(lambda: steps.logits(weights, ROWS)).launches)
    assert seen[0] == seen[1] and len(seen[0]) > 2 * DECODE_LAUNCHES_MAX["decode"]


SAMPLINGS = [
    Sampling(max_tokens=9),
    Sampling(max_tokens=9, temperature=0.0),
    Sampling(max_tokens=9, temperature=0.7, top_k=20, top_p=0.9),
    Sampling(max_tokens=9, top_p=0.5),
    Sampling(max_tokens=9, min_p=0.1, frequency_penalty=0.5, banned_token_ids=(3,)),
]


@pytest.mark.parametrize("vocab", [101, 2 * DIRECT_VOCAB_MAX])
def test_drawing_a_token_waits_for_nothing(vocab):
    with meta_as_gpu():
        edits = Edits(SAMPLINGS, [([1, 2], [3])] * len(SAMPLINGS), vocab=vocab, device=META)
    drawing = TokenSampler(SAMPLINGS, META, edits)
    logits = torch.zeros(len(SAMPLINGS), vocab, device=META)
    uniforms = torch.zeros(len(SAMPLINGS), dtype=torch.float64, device=META)
    assert watched(lambda: drawing(logits, uniforms)).waits == []


@pytest.mark.parametrize("vocab", [101, 2 * DIRECT_VOCAB_MAX])
def test_on_a_gpu_drawing_is_one_launch_behind_the_edits_and_waits_for_nothing(vocab, monkeypatch):
    monkeypatch.setattr(sampler, "has_kernel", lambda device, _: device == META)
    with meta_as_gpu():
        edits = Edits(SAMPLINGS, [([1, 2], [3])] * len(SAMPLINGS), vocab=vocab, device=META)
    logits = torch.zeros(len(SAMPLINGS), vocab, device=META)
    uniforms = torch.zeros(len(SAMPLINGS), dtype=torch.float64, device=META)
    tokens = torch.zeros(len(SAMPLINGS), dtype=torch.int64, device=META)
    alone = watched(lambda: (edits(logits), edits.note(tokens)))
    both = watched(partial(TokenSampler(SAMPLINGS, META, edits), logits, uniforms))
    assert both.waits == [] and both.counts - alone.counts == {"millrace::drawn": 1}


def test_a_steady_step_reads_once():
    engine = make_engine(make_model(), slots=8)
    engine.submit([make_work(i, prompt_of(i, 5), Sampling(max_tokens=60, ignore_eos=True)) for i in range(8)])
    while engine._batch is None or engine._batch._steps_left < 5:
        engine.step()
    with HostReads() as host:
        for _ in range(3):
            engine.step()
    assert host.reads == ["tolist"] * 3
