"""Blocks of GGUF files against the scalar formulas, and against the gguf package's own decoder."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from ninfer import formats
from ninfer.errors import FormatError
from ninfer.formats import Planes

from . import oracles

KINDS = [
    ("ggml_q4_0", 18, 32, (0,), oracles.q4_0, gguf.GGMLQuantizationType.Q4_0),
    ("ggml_q4_1", 20, 32, (0, 2), oracles.q4_1, gguf.GGMLQuantizationType.Q4_1),
    ("ggml_q8_0", 34, 32, (0,), oracles.q8_0, gguf.GGMLQuantizationType.Q8_0),
    ("ggml_q5_k", 176, 256, (0, 2), oracles.q5_k, gguf.GGMLQuantizationType.Q5_K),
    ("ggml_k", 144, 256, (0, 2), oracles.q4_k, gguf.GGMLQuantizationType.Q4_K),
    ("ggml_k", 210, 256, (208,), oracles.q6_k, gguf.GGMLQuantizationType.Q6_K),
]


def _blocks(rows: int, count: int, size: int, halves: tuple[int, ...]) -> torch.Tensor:
    """Random blocks whose FP16 fields are finite, of either sign, now and then subnormal or zero."""
    generator = torch.Generator().manual_seed(size)
    blocks = torch.randint(0, 256, (rows, count, size), dtype=torch.uint8, generator=generator)
    for at in halves:
        words = torch.randn(rows, count, 1, generator=generator).half()
        words[0, 0] = 0.0
        words[0, -1] = 2.0**-24
        blocks[..., at : at + 2] = words.view(torch.uint8)
    return blocks


@pytest.mark.parametrize(("name", "size", "group", "halves", "oracle", "kind"), KINDS)
def test_decoders(
    name: str,
    size: int,
    group: int,
    halves: tuple[int, ...],
    oracle: Callable[[bytes], list[float]],
    kind: gguf.GGMLQuantizationType,
) -> None:
    blocks = _blocks(6, 3, size, halves)
    values = formats.decode(name, Planes(blocks))
    assert values.shape == (6, 3 * group)
    for row in range(6):
        expected = [x for block in blocks[row] for x in oracle(block.numpy().tobytes())]
        assert values[row].double().tolist() == expected
    reference = gguf.quants.dequantize(blocks.reshape(6, -1).numpy(), kind)
    assert np.array_equal(values.numpy(), reference)


def test_the_check_of_the_specification() -> None:
    data = bytes(16 * i + (15 - i) for i in range(16))
    low, high = list(range(15, -1, -1)), list(range(16))
    q4_0 = torch.tensor(list(bytes.fromhex("003c") + data), dtype=torch.uint8).reshape(1, 18)
    assert formats.decode("ggml_q4_0", Planes(q4_0))[0].tolist() == [c - 8 for c in low + high]
    q4_1 = torch.tensor(list(bytes.fromhex("003c0038") + data), dtype=torch.uint8).reshape(1, 20)
    assert formats.decode("ggml_q4_1", Planes(q4_1))[0].tolist() == [c + 0.5 for c in low + high]


def test_rows_as_plain_bytes_where_the_block_is_clear() -> None:
    blocks = _blocks(2, 2, 144, (0, 2))
    flat = formats.decode("ggml_k", Planes(blocks.reshape(2, -1)))
    assert torch.equal(flat, formats.decode("ggml_k", Planes(blocks)))
    with pytest.raises(FormatError, match="one known size"):
        formats.decode("ggml_k", Planes(torch.zeros(1, 144 * 35, dtype=torch.uint8)))
    with pytest.raises(FormatError, match="one known size"):
        formats.decode("ggml_q4_0", Planes(torch.zeros(1, 19, dtype=torch.uint8)))
    with pytest.raises(FormatError, match="uint8"):
        formats.decode("ggml_q4_0", Planes(torch.zeros(1, 18)))


def test_there_is_no_encoder() -> None:
    with pytest.raises(FormatError, match="imported"):
        formats.encode("ggml_q8_0", "grouped_absmax", torch.zeros(1, 32))
