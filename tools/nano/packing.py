"""Where packed documents lie on the token axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tools.nano.geometry import CONTEXT

CHUNK = 64  # documents are padded to multiples of it


@dataclass(frozen=True)
class Packing:
    """Documents of T tokens in all, on one device.

    positions: int64 `[T]`, counted from each document's start. ends: int32 `[documents + 1]`, cumulative
    lengths, multiples of CHUNK. chunks: int32 `[T / CHUNK, 2]`, each chunk's document and place in it.
    longest: tokens of the longest document.
    """

    positions: torch.Tensor
    ends: torch.Tensor
    chunks: torch.Tensor
    longest: int


def room(tokens: int) -> int:
    """Tokens that a document takes when packed."""
    return -(-tokens // CHUNK) * CHUNK


def packing(ends: np.ndarray, device: str) -> Packing:
    """Of cumulative lengths. Made on the host: a step must not wait for the GPU to learn them.

    Positions start again after CONTEXT tokens; only filler is that long.
    """
    lengths = np.diff(ends)
    positions = np.concatenate([np.arange(n) % CONTEXT for n in lengths])
    counts = lengths // CHUNK
    places = np.concatenate([np.arange(n) for n in counts])
    chunks = np.stack([np.repeat(np.arange(len(counts)), counts), places], axis=1)
    return Packing(
        to_device(positions.astype(np.int64), device),
        to_device(ends.astype(np.int32), device),
        to_device(chunks.astype(np.int32), device),
        int(lengths.max()),
    )


def cut(ends: np.ndarray, tokens: int) -> np.ndarray:
    """The cumulative lengths of the first `tokens`; a document that lies across the cut ends there."""
    return np.append(ends[ends < tokens], tokens)


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """A copy that the host does not wait for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor
