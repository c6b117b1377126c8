"""Drawing a token in Triton, in one launch without sorting: what `TokenSampler` defines, in float32.

One program has a row. It reads the row tile by tile for the largest logit and the sum. Where tokens are cut,
it searches for the logit of the last token that stays. Each pass halves the interval, and ends at logits of
tokens. Tiles whose largest logit lies below the interval are not read. At last a token is drawn among those
that stay. Sums are in float64, in another order than on a CPU. So the two may differ where a sum reaches p or
the uniform number to the last digit.

A row is in the kernel: its logits, `tops` (the largest logit of each tile), temperature, size of the
vocabulary and number of tiles.

Shape suffixes: N rows, V vocabulary, R rows with a token mask, S settings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
TILE = 4096
NONE = tl.constexpr(float("-inf"))
INFINITE = tl.constexpr(float("inf"))


@triton.jit
def _drawn(  # type: ignore[no-untyped-def]
    logits, uniforms, settings, tops, tokens, logprobs, allowed, vocabulary, num_tiles, TILE: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    settings += index * 6
    temperature = tl.load(settings).to(tl.float32)
    row = (logits + index * vocabulary, tops + index * num_tiles, temperature, vocabulary, num_tiles)
    token, highest, lowest, total = _largest(row, TILE)
    last, room, total = _limits(row, settings, highest, lowest, total, TILE)
    if tl.load(settings + 4) == 0:
        token = _token(row, highest, last, room, tl.load(uniforms + index) * total, token, TILE)
    tl.store(tokens + index, token.to(tl.int64))
    drawn = tl.div_rn(tl.load(logits + index * vocabulary + token), temperature)
    tl.store(logprobs + index, drawn - highest - tl.log(total.to(tl.float32)))
    mask_row = tl.load(settings + 5).to(tl.int64)
    if mask_row >= 0:
        equals_before = tl.full((), 0, tl.int32)
        for tile in range(num_tiles):
            columns = tile * TILE + tl.arange(0, TILE)
            stays, equals_here = _stays(_tile(row, tile, TILE), last, room, equals_before)
            equals_before += equals_here
            place = allowed + mask_row * vocabulary + columns
            tl.store(place, stays.to(tl.uint8), mask=columns < vocabulary)


@triton.jit
def _largest(row, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first of the largest logits, that logit, the smallest finite one, the sum of all tokens' weights,
    which are 1 for the largest; and in `tops` the largest logit of each tile."""
    _, tops, _, _, num_tiles = row
    best = tl.full((), 0, tl.int32)
    highest = tl.full((), NONE, tl.float32)
    lowest = tl.full((), INFINITE, tl.float32)
    total = tl.full((), 0.0, tl.float64)
    for tile in range(num_tiles):
        x = _tile(row, tile, TILE)
        top = tl.max(x, axis=0)
        tl.store(tops + tile, top)
        if top > highest:
            best = tile * TILE + tl.argmax(x, axis=0)
            total = total * tl.exp(highest - top)
            highest = top
        total += tl.sum(_weights(x, highest), axis=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(x > NONE, x, INFINITE), axis=0))
    tl.debug_barrier()  # other threads read what one thread has stored
    return best, highest, lowest, total


@triton.jit
def _limits(row, settings, highest, lowest, total, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logit of the last token that stays, how many of its equals stay, and the sum of all that stay."""
    _, _, _, vocabulary, _ = row
    log_min_p = tl.load(settings + 1).to(tl.float32)
    top_k = tl.load(settings + 2)
    top_p = tl.load(settings + 3)
    cuts = (top_k < vocabulary) | (top_p < 1) | (log_min_p > NONE)
    last = highest + log_min_p
    room = tl.full((), 0.0, tl.float64) + vocabulary
    if cuts & (highest < INFINITE):
        last = tl.maximum(last, lowest)
        if top_k < vocabulary:
            last, above = _cut(row, highest, last, top_k, False, TILE)
            room = top_k - above
        mass, equals = _above(row, highest, last, TILE)
        room = tl.minimum(room, equals)
        total = mass + room * tl.exp(last - highest)
        if top_p < 1:
            limit = top_p * total
            before = last
            last, mass = _cut(row, highest, before, limit, True, TILE)
            mass, equals = _above(row, highest, last, TILE)
            each = tl.exp(last - highest).to(tl.float64)
            most = tl.where(last == before, room, equals)
            room = tl.minimum(tl.maximum(tl.ceil((limit - mass) / each), 1.0), most)
            total = mass + room * each
    return last, room.to(tl.int32), total


@triton.jit
def _cut(row, highest, low, limit, BY_MASS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest logit from `low` on above which there is less than `limit`, and what is above it: a
    number of tokens or their sum. It is `low` itself if all tokens from there on are less."""
    _, tops, _, _, num_tiles = row
    high = highest
    above = tl.full((), 0.0, tl.float64)
    while low < high:
        middle = 0.5 * low + 0.5 * high
        middle = tl.where((middle < high) & (middle > low), middle, low)
        amount = tl.full((), 0.0, tl.float64)
        next_above = tl.full((), INFINITE, tl.float32)
        next_below = tl.full((), NONE, tl.float32)
        for tile in range(num_tiles):
            if tl.load(tops + tile) >= low:
                x = _tile(row, tile, TILE)
                over = x > middle
                each = _weights(x, highest) if BY_MASS else over.to(tl.float64)
                amount += tl.sum(tl.where(over, each, 0.0), axis=0)
                next_above = tl.minimum(next_above, tl.min(tl.where(over, x, INFINITE), axis=0))
                inside = (x >= low) & (x <= middle)
                next_below = tl.maximum(next_below, tl.max(tl.where(inside, x, NONE), axis=0))
        if amount < limit:
            high = tl.maximum(next_below, low)
            above = amount
        else:
            low = next_above
    return high, above


@triton.jit
def _above(row, highest, last, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all tokens above `last`, and the number of its equals."""
    _, tops, _, _, num_tiles = row
    mass = tl.full((), 0.0, tl.float64)
    equals = tl.full((), 0.0, tl.float64)
    for tile in range(num_tiles):
        if tl.load(tops + tile) >= last:
            x = _tile(row, tile, TILE)
            mass += tl.sum(tl.where(x > last, _weights(x, highest), 0.0), axis=0)
            equals += tl.sum((x == last).to(tl.int32), axis=0)
    return mass, equals


@triton.jit
def _token(row, highest, last, room, threshold, token, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first token at which the sum of those that stay is above `threshold`. If rounding lets no sum reach
    it, the last token that stays."""
    _, tops, _, _, num_tiles = row
    passed = tl.full((), 0.0, tl.float64)
    equals_before = tl.full((), 0, tl.int32)
    tile = tl.full((), 0, tl.int32)
    places = tl.arange(0, TILE)
    while tile < num_tiles:
        if tl.load(tops + tile) >= last:
            x = _tile(row, tile, TILE)
            stays, equals_here = _stays(x, last, room, equals_before)
            weights = tl.where(stays, _weights(x, highest), 0.0)
            final = tl.max(tl.where(weights > 0, places, -1), axis=0)
            size = tl.sum(weights, axis=0)
            if passed + size > threshold:
                reached = (passed + tl.cumsum(weights, axis=0) > threshold) & (weights > 0)
                first = tl.min(tl.where(reached, places, TILE), axis=0)
                token = tile * TILE + tl.minimum(first, final)
                tile += num_tiles
            elif final >= 0:
                token = tile * TILE + final
            passed += size
            equals_before += equals_here
        tile += 1
    return token


@triton.jit
def _tile(row, tile, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    logits, _, temperature, vocabulary, _ = row
    columns = tile * TILE + tl.arange(0, TILE)
    return tl.div_rn(tl.load(logits + columns, mask=columns < vocabulary, other=NONE), temperature)


@triton.jit
def _weights(x, highest):  # type: ignore[no-untyped-def]
    return tl.where(x > NONE, tl.exp(x - highest), 0.0).to(tl.float64)


@triton.jit
def _stays(x, last, room, equals_before):  # type: ignore[no-untyped-def]
    equal = (x == last).to(tl.int32)
    first = equals_before + tl.cumsum(equal, axis=0) <= room
    return (x > last) | ((equal > 0) & first & (x > NONE)), tl.sum(equal, axis=0)


def drawn(
    logits_NV: Tensor, uniforms_N: Tensor, settings_NS: Tensor, num_masks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs, and what each row with a mask could sample."""
    rows, vocabulary = logits_NV.shape
    logits_NV, uniforms_N = logits_NV.contiguous(), uniforms_N.contiguous()
    num_tiles = triton.cdiv(vocabulary, TILE)
    tops = logits_NV.new_empty((rows, num_tiles))
    tokens, logprobs = logits_NV.new_empty(rows, dtype=torch.int64), logits_NV.new_empty(rows)
    allowed = logits_NV.new_empty((num_masks, vocabulary), dtype=torch.uint8)
    _drawn[rows,](
        *(logits_NV, uniforms_N, settings_NS, tops, tokens, logprobs, allowed),
        *(vocabulary, num_tiles, TILE),
        num_warps=8,
    )
    return tokens, logprobs, allowed.view(torch.bool)
