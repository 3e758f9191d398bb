"""Geometries that synthetic models may have: those of public checkpoints, and a tiny one for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.convert import text_config
from ninfer.convert.members import float32

QWEN_ROWS, QWEN_TOKENS = 248_320, 248_077


@dataclass(frozen=True)
class Shape:
    """A text config, and how many of its vocabulary rows the tokenizer addresses."""

    config: Mapping[str, Any]
    public_tokens: int

    @property
    def is_llama(self) -> bool:
        return self.config["architectures"] == ["LlamaForCausalLM"]


def _qwen(
    hidden: int,
    layers: int,
    intermediate: int,
    heads: tuple[int, int],
    gdn_heads: tuple[int, int],
    *,
    is_tied: bool,
    rows: int = QWEN_ROWS,
    tokens: int = QWEN_TOKENS,
    head_dim: int = 256,
    gdn_dim: int = 128,
    positions: int = 262_144,
) -> Shape:
    """A dense Qwen3.5: every fourth layer attends, a quarter of each head rotates."""
    pairs = head_dim // 8
    height = (pairs + 1) // 3
    config = text_config.qwen(
        hidden=hidden,
        vocab=rows,
        layer_types=[text_config.FULL if i % 4 == 3 else text_config.LINEAR for i in range(layers)],
        positions=positions,
        eps=float32(1e-6),
        is_tied=is_tied,
        intermediate=intermediate,
        attention=text_config.Attention(
            *heads, head_dim, 1e7, 0.25, [pairs - height - pairs // 3, height, pairs // 3]
        ),
        recurrence=text_config.Recurrence(gdn_heads[0], gdn_dim, gdn_heads[1], gdn_dim, 4),
        owner="a synthetic model",
    )
    return Shape(config, tokens)


def _smollm2() -> Shape:
    config = text_config.llama(
        hidden=576,
        intermediate=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        theta=1e5,
        eps=float32(1e-5),
        vocab=49_152,
        positions=8192,
        is_tied=True,
        owner="a synthetic model",
    )
    return Shape(config, 49_152)


ALIASES = {"27b": "qwen3_8_27b", "qwen3_5_27b": "qwen3_8_27b", "qwen3_6_27b": "qwen3_8_27b"} | {
    f"qwen3_5_{size}": size for size in ("9b", "4b", "2b", "0.8b")
}

GEOMETRIES: dict[str, Shape] = {
    "qwen3_8_27b": _qwen(5120, 64, 17_408, (24, 4), (16, 48), is_tied=False),
    "9b": _qwen(4096, 32, 12_288, (16, 4), (16, 32), is_tied=False),
    "4b": _qwen(2560, 32, 9216, (16, 4), (16, 32), is_tied=True),
    "2b": _qwen(2048, 24, 6144, (8, 2), (16, 16), is_tied=True),
    "0.8b": _qwen(1024, 24, 3584, (8, 2), (16, 16), is_tied=True),
    "smollm2": _smollm2(),
    "tiny": _qwen(
        256,
        4,
        512,
        (4, 2),
        (2, 4),
        is_tied=False,
        rows=512,
        tokens=500,
        head_dim=64,
        gdn_dim=64,
        positions=8192,
    ),
}
"""By name; shapes are those of the public checkpoints' configs."""
