"""Encoders of GGML's Q4_K and Q6_K blocks, which the `gguf` package can only decode.

Both store super-blocks of 256 values of a row. Q4_K: eight sub-blocks of 32, value = d*scale*code -
dmin*minimum, with 6-bit scales and minima and 4-bit codes. Q6_K: sixteen sub-blocks of 16, value =
d*scale*code, with 8-bit scales and codes of -32..31.

Scales minimize the squared error by a small search: a scale (and minimum) is fitted to each sub-block for
several assignments of codes, these are rounded to multiples of the super-block's FP16 factors, and the
neighbouring multiples are tried, before and after the factors are fitted to the codes found. Plain rounding
of the extremes is among the candidates, so no super-block is worse than that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from ninfer.errors import FormatError

BLOCK = 256
Q4_K_BYTES, Q6_K_BYTES = 144, 210
_CHUNK_BLOCKS = 2048  # keeps the search's arrays within a processor cache
_CUTS_4 = (13.0, 13.5, 14.0, 14.5, 15.0, 15.5, 16.0, 17.0)  # steps that a sub-block's range is cut into
_CUTS_6 = tuple(np.arange(29, 35.1, 0.5).tolist())  # steps between 0 and the largest magnitude
_NEIGHBOURS = (-1, 0, 1)

Arrays = tuple[np.ndarray, ...]


def encode_q4_k(values: np.ndarray) -> np.ndarray:
    """Blocks uint8 `[N, K/256 * 144]` of float32 `[N, K]`, K a multiple of 256."""
    return _encode(values, "Q4_K", Q4_K_BYTES, _q4_k)


def encode_q6_k(values: np.ndarray) -> np.ndarray:
    """Blocks uint8 `[N, K/256 * 210]` of float32 `[N, K]`, K a multiple of 256."""
    return _encode(values, "Q6_K", Q6_K_BYTES, _q6_k)


def _encode(
    values: np.ndarray, name: str, size: int, encode: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    if values.ndim != 2 or 0 in values.shape or values.shape[1] % BLOCK:
        raise FormatError(f"{name} rows are multiples of {BLOCK} values; got a matrix {list(values.shape)}")
    if not np.isfinite(values).all():
        raise FormatError(f"a matrix for {name} has values that are not finite")
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK)
    out = np.empty((len(blocks), size), np.uint8)
    for begin in range(0, len(blocks), _CHUNK_BLOCKS):
        out[begin : begin + _CHUNK_BLOCKS] = encode(blocks[begin : begin + _CHUNK_BLOCKS])
    return out.reshape(len(values), -1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    x = blocks.reshape(-1, 8, 32)
    low = np.minimum(x.min(-1), 0)
    plain = _best_affine(x, *_in_multiples((x.max(-1) - low) / 15, -low))
    fitted = _best_affine(x, *_in_multiples(*_fit_affine(x)))
    best = _keep_better(plain, fitted)
    d, dmin, scales, minima, codes, _ = _keep_better(best, _best_affine(x, *_refit_affine(x, *best[:-1])))
    nibbles = codes.astype(np.uint8).reshape(-1, 4, 2, 32)
    return np.concatenate(
        (
            _half_bytes(d),
            _half_bytes(dmin),
            _packed_six(scales.astype(np.uint8), minima.astype(np.uint8)),
            (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(-1, 128),
        ),
        1,
    )


def _in_multiples(scale: np.ndarray, minimum: np.ndarray) -> Arrays:
    """FP16 factors of the super-blocks, and their nearest multiples."""
    d, dmin = _half(scale.max(1) / 63), _half(minimum.max(1) / 63)
    return d, dmin, _multiples(scale, d, 0, 63), _multiples(minimum, dmin, 0, 63)


def _fit_affine(x: np.ndarray) -> Arrays:
    """Scale and minimum (>= 0, subtracted) of each sub-block `[..., 32]`, in float32."""
    low = np.minimum(x.min(-1, keepdims=True), 0)
    spread = x.max(-1, keepdims=True) - low
    total, count = x.sum(-1), x.shape[-1]
    scale, minimum = spread[..., 0] / 15, -low[..., 0]
    best = np.full(scale.shape, np.inf, np.float32)
    for cuts in _CUTS_4:
        codes = _codes(x - low, spread / cuts, 0, 15)
        ones, squares = codes.sum(-1), (codes * codes).sum(-1)
        products = (codes * x).sum(-1)
        steep = _ratio(count * products - ones * total, count * squares - ones * ones)
        offset = (total - steep * ones) / count
        steep = np.where(offset > 0, _ratio(products, squares), steep)
        offset = np.minimum(offset, 0)
        error = np.square(codes * steep[..., None] + offset[..., None] - x).sum(-1)
        better = error < best
        best = np.where(better, error, best)
        scale, minimum = np.where(better, steep, scale), np.where(better, -offset, minimum)
    return scale, minimum


def _best_affine(
    x: np.ndarray, d: np.ndarray, dmin: np.ndarray, scales: np.ndarray, minima: np.ndarray
) -> Arrays:
    """d, dmin, scales, minima, codes, squared error: the best among neighbouring multiples."""
    found: Arrays = (scales, minima, np.zeros_like(x), np.full(scales.shape, np.inf, np.float32))
    for more_scale, more_minimum in itertools.product(_NEIGHBOURS, _NEIGHBOURS):
        a, b = np.clip(scales + more_scale, 0, 63), np.clip(minima + more_minimum, 0, 63)
        step, offset = (d[:, None] * a)[..., None], (dmin[:, None] * b)[..., None]
        codes = _codes(x + offset, step, 0, 15)
        found = _keep_better(found, (a, b, codes, np.square(codes * step - offset - x).sum(-1)))
    return d, dmin, *found[:-1], found[-1].sum(1)


def _refit_affine(
    x: np.ndarray, d: np.ndarray, dmin: np.ndarray, scales: np.ndarray, minima: np.ndarray, codes: np.ndarray
) -> Arrays:
    """The least-squares factors of the super-blocks for these multiples and codes, and the multiples."""
    u = (codes * scales[..., None]).reshape(len(x), -1)
    v = -np.broadcast_to(minima[..., None], x.shape).reshape(len(x), -1)
    y = x.reshape(len(x), -1)
    uu, uv, vv, uy, vy = ((a * b).sum(1) for a, b in ((u, u), (u, v), (v, v), (u, y), (v, y)))
    determinant = uu * vv - uv * uv
    new_d, new_dmin = _ratio(uy * vv - vy * uv, determinant), _ratio(vy * uu - uy * uv, determinant)
    usable = (new_d > 0) & (new_dmin > 0) & (new_d < 2 * d) & (new_dmin < 2 * dmin)
    d, dmin = (_half(np.where(usable, new, old)) for new, old in ((new_d, d), (new_dmin, dmin)))
    return d, dmin, scales, minima


def _packed_six(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Twelve bytes of eight 6-bit scales and minima; the first four keep the upper two bits of the last."""
    return np.concatenate(
        (
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
        ),
        1,
    )


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    x = blocks.reshape(-1, 16, 16)
    plain = np.abs(x).max(-1) / 31
    starts = [
        _best_symmetric(x, d, _multiples(scale, d, -128, 127))
        for scale, d in ((plain, _half(plain.max(1) / 127)), _with_factor(_fit_symmetric(x)))
    ]
    d, scales, codes, _ = best = _keep_better(*starts)
    u = (codes * scales[..., None]).reshape(len(x), -1)
    refit = _ratio((u * blocks).sum(1), (u * u).sum(1))
    refit = _half(np.where(refit * d > 0, refit, d))
    d, scales, codes, _ = _keep_better(best, _best_symmetric(x, refit, scales))
    stored = (codes + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (stored[:, :, :2] & 15) | (stored[:, :, 2:] & 15) << 4
    high = stored >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate(
        (
            low.reshape(-1, 128),
            high.reshape(-1, 64),
            scales.astype(np.int8).view(np.uint8),
            _half_bytes(d),
        ),
        1,
    )


def _fit_symmetric(x: np.ndarray) -> np.ndarray:
    """The scale, of either sign, of each sub-block `[..., 16]`."""
    peak = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    scale = peak[..., 0] / -32
    best = np.full(scale.shape, np.inf, np.float32)
    for cuts, sign in itertools.product(_CUTS_6, (1, -1)):
        codes = _codes(x, sign * peak / cuts, -32, 31)
        fitted = _ratio((codes * x).sum(-1), (codes * codes).sum(-1))
        error = np.square(codes * fitted[..., None] - x).sum(-1)
        better = error < best
        best, scale = np.where(better, error, best), np.where(better, fitted, scale)
    return scale


def _with_factor(scale: np.ndarray) -> Arrays:
    """The scales and their FP16 factors; the largest gets the multiple that has no positive counterpart."""
    peak = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)[:, 0]
    return scale, _half(peak / -128)


def _best_symmetric(x: np.ndarray, d: np.ndarray, scales: np.ndarray) -> Arrays:
    """d, scales, codes, squared error: the best among neighbouring multiples."""
    found: Arrays = (scales, np.zeros_like(x), np.full(scales.shape, np.inf, np.float32))
    for more in _NEIGHBOURS:
        a = np.clip(scales + more, -128, 127)
        step = (d[:, None] * a)[..., None]
        codes = _codes(x, step, -32, 31)
        found = _keep_better(found, (a, codes, np.square(codes * step - x).sum(-1)))
    return d, *found[:-1], found[-1].sum(1)


def _keep_better(old: Arrays, new: Arrays) -> Arrays:
    """Of two encodings the one with less error (the last array), decided for each of its elements."""
    better = new[-1] < old[-1]
    return tuple(
        np.where(better.reshape(better.shape + (1,) * (a.ndim - better.ndim)), b, a)
        for a, b in zip(old, new, strict=True)
    )


def _codes(x: np.ndarray, step: np.ndarray, low: int, high: int) -> np.ndarray:
    """The nearest codes, as float32."""
    return np.clip(np.rint(_ratio(x, step)), low, high)


def _multiples(values: np.ndarray, unit: np.ndarray, low: int, high: int) -> np.ndarray:
    """`values` `[n, parts]` in whole units `[n]`, as float32."""
    return np.clip(np.rint(_ratio(values, unit[:, None])), low, high)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _half(values: np.ndarray) -> np.ndarray:
    """Rounded to FP16, as float32."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16).astype(np.float32)
    if not np.isfinite(rounded).all():
        raise FormatError(
            f"a block's factor {np.abs(values).max():.4g} does not fit FP16; scale the weights down"
        )
    return rounded


def _half_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)
