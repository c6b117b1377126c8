"""Every layout that fits in memory, with the step time that roofline and memory alone predict.

A layout says which devices train and which generate, in which parallel shape. All devices that train are of
one kind. Those that generate are of one kind or two: what is left of the trainer's kind generates too. The
rest of a mixed cluster stays idle.
The prediction is LlamaRL's max(train, generate) with mean lengths. The simulator adds the effects that the
prediction leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from millrace_sim.costs.generation import Generation
from millrace_sim.costs.hardware import Device
from millrace_sim.costs.models import ModelSizes
from millrace_sim.costs.training import Training

TENSOR_PARALLEL = (1, 2, 4, 8, 16)
MODEL_PARALLEL = (1, 2, 4, 8, 16, 32)
SLOTS = (32, 64, 128, 256)
SPLITS = 24
"""Number of splits tried between one trainer rank and all devices but one replica."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of one optimizer step. Tokens are means of a sample; `longest` is the longest sequence."""

    samples: int
    prompt_tokens: float
    completion_tokens: float
    longest: int


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """`train_s` and `generate_s`: predicted seconds of a step, each side alone. `colocated`: both sides use
    the same devices, in turns. `other`: `other_replicas` more replicas, on the trainer's kind of device."""

    training: Training
    generation: Generation
    replicas: int
    slots: int
    train_s: float
    generate_s: float
    colocated: bool = False
    other: Generation | None = None
    other_replicas: int = 0

    @property
    def step_s(self) -> float:
        return self.train_s + self.generate_s if self.colocated else max(self.train_s, self.generate_s)

    @property
    def all_replicas(self) -> int:
        return self.replicas + self.other_replicas

    def used(self) -> dict[str, int]:
        """Devices by kind."""
        used = {self.training.device.name: self.training.devices}
        if self.colocated:
            return used
        name = self.generation.device.name
        used[name] = used.get(name, 0) + self.replicas * self.generation.tensor_parallel
        if self.other is not None:
            used[self.other.device.name] += self.other_replicas * self.other.tensor_parallel
        return used

    def describe(self) -> str:
        training, generation, other = self.training, self.generation, self.other
        more = (
            f" and {self.other_replicas} x {other.tensor_parallel} {other.device.name}"
            if other is not None
            else ""
        )
        return (
            f"{training.devices} {training.device.name} train (model parallel {training.model_parallel}), "
            f"{self.replicas} x {generation.tensor_parallel} {generation.device.name}{more} generate in "
            f"{generation.dtype}, {self.slots} slots{', in turns' if self.colocated else ''}"
        )


def layouts(
    model: ModelSizes, devices: Mapping[Device, int], demand: Demand, dtypes: Sequence[str] = ("bf16",)
) -> list[PlanLayout]:
    """All layouts that fit, the best prediction first; empty if the model does not fit."""
    fitting = [
        layout
        for train_on, trainers in devices.items()
        for generate_on, generators in devices.items()
        for training in _trainings(model, train_on, trainers, demand)
        for generation in _generations(model, generate_on, generators, demand, dtypes)
        for layout in _splits(training, generation, trainers, generators, demand)
    ]
    fitting += [more for layout in fitting for more in _with_rest(layout, devices, demand)]
    return sorted(fitting, key=lambda layout: (layout.step_s, layout.train_s + layout.generate_s))


def layouts_in_turns(
    model: ModelSizes, devices: Mapping[Device, int], demand: Demand, dtypes: Sequence[str] = ("bf16",)
) -> list[PlanLayout]:
    """Layouts in which both sides use all devices of one kind, of one host: each side has to fit alone. A
    replica is one device. The best prediction comes first."""
    fitting = []
    for device, count in devices.items():
        if count > device.devices_per_host:
            continue
        trainings = [one for one in _trainings(model, device, count, demand) if one.devices == count]
        generations = _generations(model, device, 1, demand, dtypes)
        for training, generation in product(trainings, generations):
            needed_s = train_s(training, demand)
            for slots in slots_that_fit(generation, demand):
                sides_s = needed_s, generate_s(generation, count, slots, demand)
                fitting.append(PlanLayout(training, generation, count, slots, *sides_s, colocated=True))
    return sorted(fitting, key=lambda layout: layout.step_s)


def train_s(training: Training, demand: Demand) -> float:
    """A step of equal sequences of the mean length."""
    length = round(demand.prompt_tokens + demand.completion_tokens)
    work = demand.samples * training.sequence_flops(length)
    seconds = work / (training.device.bf16_flops * training.mfu * training.devices)
    return max(seconds, training.traffic_s()) + training.optimizer_s()


def generate_s(generation: Generation, replicas: int, slots: int, demand: Demand) -> float:
    """Seconds to decode the samples of a step with `slots` samples always in flight on each replica."""
    sample_s = generation.sample_s(slots, demand.prompt_tokens, demand.completion_tokens)
    prompts_s = generation.prefill_s(round(demand.prompt_tokens))
    return demand.samples / replicas * (sample_s + prompts_s / 2)


def layout_generate_s(layout: PlanLayout, demand: Demand) -> float:
    """As `generate_s`, with the other replicas: the samples divide by speed."""
    alone_s = generate_s(layout.generation, layout.replicas, layout.slots, demand)
    if layout.other is None:
        return alone_s
    other_s = generate_s(layout.other, layout.other_replicas, layout.slots, demand)
    return 1.0 / (1.0 / alone_s + 1.0 / other_s)


def slots_that_fit(generation: Generation, demand: Demand) -> list[int]:
    """Powers of two, and at most what KV holds if every sequence grows to the longest."""
    most = generation.kv_capacity_tokens // demand.longest
    return [slots for slots in SLOTS if slots <= most] or ([most] if most else [])


def _trainings(model: ModelSizes, device: Device, count: int, demand: Demand) -> Iterator[Training]:
    """The trainer's shape with the least model parallelism that fits, for each number of devices."""
    step = max(1, count // SPLITS)
    for devices in range(step, count + 1, step):
        for size in MODEL_PARALLEL:
            if devices % size == 0:
                training = Training(model, device, devices, model_parallel=size)
                if training.fits(demand.longest):
                    yield training
                    break


def _generations(
    model: ModelSizes, device: Device, count: int, demand: Demand, dtypes: Sequence[str]
) -> Iterator[Generation]:
    for size in TENSOR_PARALLEL:
        for dtype in dtypes:
            generation = Generation(model, device, size, dtype)
            if size <= count and generation.fits and slots_that_fit(generation, demand):
                yield generation


def _splits(
    training: Training, generation: Generation, trainers: int, generators: int, demand: Demand
) -> Iterator[PlanLayout]:
    shared = training.device == generation.device
    left = generators - training.devices if shared else generators
    replicas = left // generation.tensor_parallel
    if replicas < 1 or training.devices > trainers:
        return
    needed_s = train_s(training, demand)
    for slots in slots_that_fit(generation, demand):
        seconds = generate_s(generation, replicas, slots, demand)
        yield PlanLayout(training, generation, replicas, slots, needed_s, seconds)


def _with_rest(layout: PlanLayout, devices: Mapping[Device, int], demand: Demand) -> Iterator[PlanLayout]:
    """`layout` with replicas on those devices of the trainer's kind that neither train nor generate."""
    training, generation = layout.training, layout.generation
    rest = devices[training.device] - layout.used()[training.device.name]
    if training.device == generation.device or not rest:
        return
    for other in _generations(generation.model, training.device, rest, demand, (generation.dtype,)):
        if layout.slots <= max(slots_that_fit(other, demand)):
            whole = replace(layout, other=other, other_replicas=rest // other.tensor_parallel)
            yield replace(whole, generate_s=layout_generate_s(whole, demand))
            return
