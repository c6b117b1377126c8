"""What ranks do in these tests. Each function runs in every rank."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from trainer_doubles import choosing, make_batch, make_trainer

from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.errors import MillraceError
from millrace.core.types import Batch
from millrace.trainer.model import load_model, named_weights, recompute_layers
from millrace.trainer.ranks.mesh import ALONE, Ranks, local
from millrace.trainer.trainer import PolicyTrainer

CPU = torch.device("cpu")
BUDGET = 60  # tokens of a row: several rows a batch
BF16 = torch.bfloat16
BY_SEQUENCE = PolicyGradient(
    kind="gspo", anchor="behavior", correction=None, clip_low=0.9, clip_high=50.0, drift=0.5, entropy=0.1
)
SETTLED = PolicyGradient(kind="m2po", second_moment=2.0, kl=0.1, kl_in="reward", kl_estimator="k1")

Shape = dict[str, int]


def meet(rank: int, rendezvous: str, shapes: list[Shape]) -> list[Ranks]:
    made = [Ranks(**shape, rank=rank) for shape in shapes]
    made[0].join(rendezvous, CPU)
    return made


def batch_of(groups: int = 6, version: int = 0) -> Batch:
    return make_batch(version=version, groups=groups)


def trainer_of(path: Path, ranks: Ranks, *, recompute: bool = False, **changes: Any) -> PolicyTrainer:
    model = load_model(path, CPU, ranks, computing=changes.get("dtype", torch.float32))
    if recompute:
        recompute_layers(model)
    return make_trainer(model=model, ranks=ranks, **{"token_budget": BUDGET} | changes)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([whole(tensor.detach()).flatten().double() for tensor in tensors])


def gradient(trainer: PolicyTrainer, batch: Batch) -> torch.Tensor:
    trainer.accumulate(batch)
    return flat(parameter.grad for parameter in trainer.model.parameters())


def in_double(trainer: PolicyTrainer) -> PolicyTrainer:
    """The same, computed in float64 throughout: transformers rounds norms to float32."""
    for module in trainer.model.modules():
        if "RMSNorm" in type(module).__name__:
            type(module).forward = _norm
    trainer.model.double()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return trainer


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def error(found: torch.Tensor, due: torch.Tensor) -> float:
    return float((found - due).norm() / due.norm())


Computation = Callable[[Path, Ranks], torch.Tensor]

COMPUTATIONS: dict[str, Computation] = {
    "packed": lambda path, ranks: gradient(trainer_of(path, ranks), batch_of()),
    "recomputed": lambda path, ranks: gradient(trainer_of(path, ranks, recompute=True), batch_of()),
    "fewer rows than ranks": lambda path, ranks: gradient(
        trainer_of(path, ranks, token_budget=10_000), batch_of(groups=1)
    ),
    "weights rounded": lambda path, ranks: gradient(trainer_of(path, ranks, published=BF16), batch_of()),
    "in bfloat16": lambda path, ranks: gradient(
        trainer_of(path, ranks, published=BF16, dtype=BF16), batch_of()
    ),
    "against a reference": lambda path, ranks: against_a_reference(path, ranks),
    "settled for the batch": lambda path, ranks: settled(path, ranks),
    "steps with a critic": lambda path, ranks: three_steps(
        path, ranks, algorithm=PolicyGradient(kind="ppo", value_trunk=0.5)
    )[0],
    "weights after three steps": lambda path, ranks: three_steps(path, ranks)[0],
    "several steps a batch": lambda path, ranks: three_steps(
        path, ranks, algorithm=PolicyGradient(normalize="sequence"), minibatches=2, epochs=2
    )[0],
    "by sequence in float64": lambda path, ranks: gradient(
        in_double(trainer_of(path, ranks, algorithm=BY_SEQUENCE, dtype=torch.float64)), batch_of()
    ),
    "cut sampling in float64": lambda path, ranks: gradient(
        in_double(trainer_of(path, ranks, algorithm=PolicyGradient(entropy=0.1), dtype=torch.float64)),
        choosing(batch_of()),
    ),
    "with a critic in float64": lambda path, ranks: with_a_critic(path, ranks),
    "in float64": lambda path, ranks: gradient(  # the last: norms stay exact
        in_double(trainer_of(path, ranks, dtype=torch.float64)), batch_of()
    ),
}


def gradient_errors(
    rank: int, rendezvous: str, shapes: list[Shape], paths: dict[str, Path]
) -> dict[Any, float]:
    """Relative error of a batch's gradient against one process, by family and shape of the mesh."""
    meetings = meet(rank, rendezvous, shapes)
    found = {}
    for family, path in paths.items():
        due = gradient(trainer_of(path, ALONE), batch_of())
        for ranks, shape in zip(meetings, shapes, strict=True):
            found[family, str(shape)] = error(gradient(trainer_of(path, ranks), batch_of()), due)
    return found


def errors(rank: int, rendezvous: str, shapes: list[Shape], paths: dict[str, Path]) -> dict[Any, float]:
    """Relative error against one process, by computation, family and shape of the mesh."""
    found = {}
    meetings = meet(rank, rendezvous, shapes)
    for name, family in product(COMPUTATIONS, paths):
        if family == "qwen3" or name in ("packed", "in float64"):
            compute, path = COMPUTATIONS[name], paths[family]
            due = compute(path, ALONE) if rank == 0 else None
            for ranks, shape in zip(meetings, shapes, strict=True):
                result = compute(path, ranks)
                if due is not None:
                    found[name, family, str(shape)] = error(result, due)
    return found


def against_a_reference(path: Path, ranks: Ranks) -> torch.Tensor:
    reference = load_model(f"{path}-other", CPU, ranks)
    found = gradient(
        trainer_of(path, ranks, algorithm=PolicyGradient(kl=0.5), reference=reference), batch_of()
    )
    embedding = reference.get_input_embeddings().weight
    assert ranks.world == 1 or hasattr(embedding, "placements"), "the reference was not divided again"
    return found


def settled(path: Path, ranks: Ranks) -> torch.Tensor:
    """What the first pass over a batch decides for all ranks: a mask, and rewards less a penalty."""
    reference = load_model(f"{path}-other", CPU, ranks)
    return gradient(trainer_of(path, ranks, algorithm=SETTLED, reference=reference), batch_of())


def with_a_critic(path: Path, ranks: Ranks) -> torch.Tensor:
    trainer = trainer_of(
        path, ranks, algorithm=PolicyGradient(kind="ppo", value_trunk=0.5), dtype=torch.float64
    )
    head = trainer.value_head
    assert head is not None
    with torch.no_grad():
        head.weight.normal_(std=10.0, generator=torch.Generator().manual_seed(1))
    head.double()
    found = gradient(in_double(trainer), batch_of())
    head.share_gradient(ranks)
    return torch.cat([found, *(parameter.grad.flatten() for parameter in head.parameters())])


def three_steps(path: Path, ranks: Ranks, **changes: Any) -> tuple[torch.Tensor, Any]:
    trainer = trainer_of(path, ranks, optimizer=Optimizer(lr=1e-3, grad_clip=0.1), **changes)
    with tempfile.TemporaryDirectory() as directory:
        results = [trainer.step(batch_of(version=v), rejected_dir=Path(directory)) for v in range(3)]
    head = [] if trainer.value_head is None else trainer.value_head.parameters()
    return flat([*trainer.model.parameters(), *head]), results[-1]


def results(rank: int, rendezvous: str, shapes: list[Shape], path: Path) -> list[Any]:
    """The third step's result: that of one process, then that of each shape."""
    meetings = [ALONE, *meet(rank, rendezvous, shapes)]
    return [three_steps(path, ranks)[1] if rank == 0 or ranks.world > 1 else None for ranks in meetings]


def refusals(rank: int, rendezvous: str, shapes: list[Shape], path: Path) -> list[tuple[str, bool]]:
    """What each rank's step raises where something is wrong on rank 1 alone, and whether weights changed."""
    return [
        refusal
        for ranks in meet(rank, rendezvous, shapes)
        for refusal in (_refused(path, ranks, _break_loss), _refused(path, ranks, _break_weights))
    ]


def _refused(path: Path, ranks: Ranks, spoil: Callable[[PolicyTrainer], None]) -> tuple[str, bool]:
    trainer = trainer_of(path, ranks)
    before = [local(weight).clone() for weight in named_weights(trainer.model).values()]
    if ranks.rank == 1:
        spoil(trainer)
    try:
        with tempfile.TemporaryDirectory() as directory:
            trainer.step(batch_of(), rejected_dir=Path(directory))
    except MillraceError as refusal:
        after = [local(weight) for weight in named_weights(trainer.model).values()]
        changed = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        return f"{type(refusal).__name__}: {refusal}".partition(";")[0], changed
    return "nothing", True


def _break_loss(trainer: PolicyTrainer) -> None:
    algorithm = trainer.algorithm

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(algorithm, name)

        def objective(self, *args: Any) -> torch.Tensor:
            return algorithm.objective(*args) * float(np.nan)

    trainer.algorithm = Broken()  # type: ignore[assignment]


def _break_weights(trainer: PolicyTrainer) -> None:
    step = trainer.optimizer.step

    def broken() -> None:
        step()
        local(trainer.model.get_input_embeddings().weight)[0] = torch.inf

    trainer.optimizer.step = broken  # type: ignore[method-assign]


def shares(rank: int, rendezvous: str, shapes: list[Shape], path: Path) -> list[float]:
    """What a rank holds of the weights, as a fraction, for each shape."""
    whole_numel = sum(weight.numel() for weight in named_weights(load_model(path, CPU)).values())
    found = []
    for ranks in meet(rank, rendezvous, shapes):
        weights = named_weights(load_model(path, CPU, ranks)).values()
        found.append(sum(local(weight).numel() for weight in weights) / whole_numel)
    return found
