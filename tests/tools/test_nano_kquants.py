"""Our K-quant encoders against ggml's decoder, plain rounding, and the best that any scale could reach."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from ninfer import formats
from ninfer.errors import FormatError
from tools.nano import kquants

ENCODERS = {
    "Q4_K": (kquants.encode_q4_k, kquants.Q4_K_BYTES),
    "Q6_K": (kquants.encode_q6_k, kquants.Q6_K_BYTES),
}
SHAPE = (300, 512)


def _samples() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    scale = np.exp(generator.normal(0, 2, (SHAPE[0], 1)))
    return {
        "normal": 0.05 * generator.standard_normal((2100, 512)),
        "heavy tails": scale * generator.laplace(size=SHAPE),
        "positive": generator.random(SHAPE) + 3,
        "negative": -generator.random(SHAPE) - 3,
        "sparse": generator.standard_normal(SHAPE) * (generator.random(SHAPE) < 0.02),
        "outliers": np.where(generator.random(SHAPE) < 0.01, 40, 1) * generator.standard_normal(SHAPE),
        "tiny": 1e-6 * generator.standard_normal(SHAPE),
    }


SAMPLES = {name: values.astype(np.float32) for name, values in _samples().items()}


def _decoded(kind: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def _plain_q4(x: np.ndarray) -> np.ndarray:
    """Smallest and largest value of every sub-block, rounded to nearest multiples, float64 otherwise."""
    parts = x.astype(np.float64).reshape(-1, 8, 32)
    low = np.minimum(parts.min(-1), 0)
    scale, minimum = (parts.max(-1) - low) / 15, -low
    step, offset = _multiples(scale, 63), _multiples(minimum, 63)
    codes = np.clip(np.rint((parts + offset[..., None]) / np.maximum(step, 1e-30)[..., None]), 0, 15)
    return (codes * step[..., None] - offset[..., None]).reshape(x.shape)


def _plain_q6(x: np.ndarray) -> np.ndarray:
    """Largest magnitude of every sub-block at code 31."""
    parts = x.astype(np.float64).reshape(-1, 16, 16)
    step = _multiples(np.abs(parts).max(-1) / 31, 127)
    codes = np.clip(np.rint(parts / np.maximum(step, 1e-30)[..., None]), -32, 31)
    return (codes * step[..., None]).reshape(x.shape)


def _multiples(values: np.ndarray, most: int) -> np.ndarray:
    unit = (values.max(1, keepdims=True) / most).astype(np.float16).astype(np.float64)
    return np.rint(values / np.maximum(unit, 1e-30)) * unit


PLAIN: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q4_K": _plain_q4, "Q6_K": _plain_q6}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("kind", ENCODERS)
def test_our_decoder_reads_the_blocks_as_ggml_does(kind: str, sample: str) -> None:
    encode, size = ENCODERS[kind]
    blocks = encode(SAMPLES[sample])
    assert blocks.dtype == np.uint8
    assert blocks.shape == (len(SAMPLES[sample]), 512 // 256 * size)
    planes = formats.Planes(torch.from_numpy(blocks).reshape(len(blocks), -1, size))
    assert np.array_equal(formats.decode("ggml_k", planes).numpy(), _decoded(kind, blocks))


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("kind", ENCODERS)
def test_the_search_beats_plain_rounding_in_every_block(kind: str, sample: str) -> None:
    x = SAMPLES[sample]
    ours = _squares(_decoded(kind, ENCODERS[kind][0](x)) - x.astype(np.float64))
    plain = _squares(PLAIN[kind](x) - x)
    assert (ours <= plain * (1 + 1e-6) + 1e-13 * _squares(x.astype(np.float64))).all()
    if sample in ("normal", "heavy tails"):
        assert ours.sum() <= 0.85 * plain.sum()


def _squares(errors: np.ndarray) -> np.ndarray:
    return np.square(errors).reshape(-1, 256).sum(1)


@pytest.mark.parametrize(("kind", "limit"), [("Q4_K", 1.05), ("Q6_K", 1.06)])
def test_the_error_is_close_to_the_optimum(kind: str, limit: float) -> None:
    """Against a bound out of reach: the best scales and minima of a grid, each sub-block by itself."""
    x = SAMPLES["normal"][:4].reshape(-1, 256)
    error = np.square(_decoded(kind, ENCODERS[kind][0](x)) - x.astype(np.float64)).sum()
    size = 32 if kind == "Q4_K" else 16
    bound = sum(_optimum(part, kind) for part in x.reshape(-1, size).astype(np.float64))
    assert error <= limit * bound, error / bound


def _optimum(part: np.ndarray, kind: str) -> float:
    """Least squared error of one sub-block: a grid of scales and minima, FP64."""
    if kind == "Q6_K":
        peak = np.abs(part).max()
        steps = np.concatenate((peak / np.linspace(26, 36, 1500), -peak / np.linspace(26, 36, 1500)))[:, None]
        return float(np.square(np.clip(np.rint(part / steps), -32, 31) * steps - part).sum(1).min())
    spread = part.max() - part.min()
    steps = (spread / np.linspace(11.5, 19, 150))[:, None, None]
    offsets = (-part.min() - spread * np.linspace(-0.05, 0.2, 200))[:, None]
    codes = np.clip(np.rint((part + offsets) / steps), 0, 15)
    return float(np.square(codes * steps - offsets - part).sum(-1).min())


@pytest.mark.parametrize("kind", ENCODERS)
def test_constant_blocks(kind: str) -> None:
    x = np.repeat(np.array([[0], [0.5], [-2], [3e-9]], np.float32), 256, 1)
    found = _decoded(kind, ENCODERS[kind][0](x))
    assert not found[0].any()
    assert np.allclose(found[1:3], x[1:3], rtol=0.01)
    assert np.abs(found[3]).max() <= 2**-24 * 64


@pytest.mark.parametrize("kind", ENCODERS)
def test_what_cannot_be_encoded_is_refused(kind: str) -> None:
    encode, _ = ENCODERS[kind]
    with pytest.raises(FormatError, match="multiples of 256"):
        encode(np.zeros((2, 640), np.float32))
    with pytest.raises(FormatError, match="not finite"):
        encode(np.full((1, 256), np.nan, np.float32))
    with pytest.raises(FormatError, match="FP16"):
        encode(np.full((1, 256), 3e10, np.float32))
