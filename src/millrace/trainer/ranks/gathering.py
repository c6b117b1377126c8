"""The modules of a model that gather their weights on their own, and the number format of gathered weights.

Each layer gathers its weights before it computes. The embedding and the output projection gather theirs, too:
together they are larger than several layers, and gathered by the model they would stay until the end.

Where matmuls are in bfloat16, layers and the output projection gather weights in bfloat16. This rounds
exactly the numbers that the matmuls, and the published version, would round. A gradient is that of a rounded
weight, as in autocast, and ranks sum gradients in float32. The embedding is gathered in float32, because a
token that occurs often has a gradient of many summands. A projection that is tied to the embedding is
gathered with it, by the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from numpy import int64
from numpy.typing import NDArray
from transformers import PreTrainedModel

from millrace.devices.gpu import on
from millrace.trainer.ranks.mesh import Ranks
from millrace.trainer.row_logprobs import masks_on, token_logprobs

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from millrace.trainer.recorded import TokenMasks


def gathering_modules(
    model: PreTrainedModel, computing: torch.dtype
) -> Iterator[tuple[torch.nn.Module, MixedPrecisionPolicy]]:
    """Each module with the format of its gathered weights, the whole model last. `computing`: of the matmuls.
    The output projection gets a method `target_logprobs`, which must gather its weight."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    single, rounded = MixedPrecisionPolicy(), MixedPrecisionPolicy(cast_forward_inputs=False)
    if computing.itemsize < 4:
        rounded = MixedPrecisionPolicy(computing, torch.float32, cast_forward_inputs=False)
        model.gathers_rounded = True
    for layer in model.base_model.layers:
        yield layer, rounded
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        head.target_logprobs = partial(target_logprobs, head)
        yield embedding, single
        yield head, rounded
    yield model, single


def gathered_rounded(model: PreTrainedModel) -> set[torch.Tensor]:
    """The weights of the layers, if gathering rounds them."""
    rounds = getattr(model, "gathers_rounded", False)
    return set(model.base_model.layers.parameters()) if rounds else set()


def target_logprobs(
    head: torch.nn.Module,
    hidden_PH: torch.Tensor,
    targets_P: NDArray[int64],
    masks_P: TokenMasks | None,
    ranks: Ranks,
    temperature: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` with the weight of the output projection `head`, or with this rank's block of it."""
    weight, first, device = cast(Any, head.weight), 0, hidden_PH.device
    if (group := ranks.group("tensor")) is not None:
        from millrace.trainer.ranks.rank_exchange import same

        first = ranks.tensor_index * -(-len(weight) // ranks.tensor)
        hidden_PH, weight = same(hidden_PH, group), weight.to_local()
    return token_logprobs(
        hidden_PH,
        weight,
        on(device, targets_P - first),
        temperature=temperature,
        softcap=softcap,
        group=group,
        token_masks=None if masks_P is None else masks_on(device, masks_P, first, len(weight)),
        rounded_VH=getattr(head, "rounded", None),
    )
