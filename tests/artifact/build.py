"""Small artifacts for tests: a directory with a bit of everything, its bytes, and files made by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ninfer.artifact import (
    ArtifactWriter,
    Binding,
    Component,
    Directory,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
    default_layout,
    encoded_bytes,
    place,
)

ID = bytes(range(16))
PAGE = 4096


def tensor(id: str, format: str, shape: tuple[int, ...], q6_rows: int | None = None) -> TensorObject:
    layout = default_layout(format)
    return TensorObject(id, shape, format, layout, 0, encoded_bytes(format, layout, shape, q6_rows=q6_rows))


def directory() -> Directory:
    """Two components, a resource of odd length, several formats, parts, a Use with a divisor."""
    objects = place(
        [
            ResourceObject("resource/text/tokenizer.json", "raw_bytes_v1", 0, 12999),
            tensor("weight/0", "q4_g64_fp16", (24, 64)),
            tensor("weight/1", "nvfp4", (128, 64)),
            tensor("weight/2", "ggml_k", (3, 256), q6_rows=1),
            tensor("weight/3", "bf16", (5, 7)),
            tensor("weight/4", "q8_g32_fp16", (3, 40)),
            tensor("auxiliary/0", "fp32", ()),
        ]
    )
    divisor = Binding.to(objects["auxiliary/0"])  # type: ignore[arg-type]
    return Directory(
        components={
            "text": Component(
                {"architectures": ["Toy"], "eps": 9.999999974752427e-07, "nested": {"ü": [1, None, True]}},
                resources={"tokenizer.json": "resource/text/tokenizer.json"},
                proposal=Proposal("indexed", 12),
            ),
            "mtp": Component({}, target="text"),
        },
        objects=objects,
        bindings={
            "text/a": Binding((Part("weight/0", 0, 8 * 64),)),
            "text/b": Binding((Part("weight/0", 8 * 64, 24 * 64), Part("weight/0", 0, 64))),
            "text/c": Binding.to(objects["weight/1"]),  # type: ignore[arg-type]
            "text/d": Binding.to(objects["weight/2"]),  # type: ignore[arg-type]
            "text/norm": Binding.to(objects["weight/3"]),  # type: ignore[arg-type]
            "mtp/e": Binding.to(objects["weight/4"]),  # type: ignore[arg-type]
        },
        uses=(
            Use("text/a", "text/x", "A16Only"),
            Use("text/c", "text/x", "AllowA4", {"activation_input_divisor": divisor}),
            Use("text/c", "text/y"),
        ),
        metadata={"name": "toy – ü"},
        provenance={"made": {"by": "hand"}},
    )


def contents(directory: Directory) -> dict[str, bytes]:
    """Random bytes for every object (the ggml_k row table is right)."""
    generator = np.random.default_rng(7)
    data = {
        id: generator.integers(0, 256, record.bytes, dtype=np.uint8).tobytes()
        for id, record in directory.objects.items()
    }
    if "weight/2" in data:
        table = struct.pack("<3Q", 0, (144 << 1) | 1, (144 + 210) << 1)
        data["weight/2"] = table + bytes(256 - len(table)) + data["weight/2"][256:]
    return data


def write(
    path: Path, directory: Directory, data: dict[str, bytes], limit: int = 10**9, step: int | None = None
) -> Directory:
    """Write in one piece or in pieces of `step` bytes; the directory that was written."""
    with ArtifactWriter(path, directory, max_file_bytes=limit, artifact_id=ID) as writer:
        for id, content in data.items():
            for begin in range(0, len(content), step or len(content)):
                writer.write(id, begin, content[begin : begin + (step or len(content))])
        writer.commit()
    return writer.directory


def root() -> dict[str, Any]:
    """A root record as a person would type it: one resource, one bf16 matrix, an mtp component."""
    return {
        "components": {
            "text": {
                "config": {"architectures": ["Toy"]},
                "resources": {"tokenizer.json": "r"},
                "proposal": {"domain": "full"},
            },
            "mtp": {"config": {}, "target": "text"},
        },
        "objects": [
            {"id": "r", "kind": "resource", "encoding": "raw_bytes_v1", "offset": 0, "bytes": 3},
            {
                "id": "w",
                "kind": "tensor",
                "shape": [4, 8],
                "format": "bf16",
                "layout": "contiguous_le_v1",
                "offset": 256,
                "bytes": 64,
            },
            {
                "id": "s",
                "kind": "tensor",
                "shape": [],
                "format": "fp32",
                "layout": "contiguous_le_v1",
                "offset": 512,
                "bytes": 4,
            },
        ],
        "bindings": {
            "text/w": {"object": "w"},
            "text/v": {"parts": [{"object": "w", "range": [0, 8]}, {"object": "w", "range": [24, 32]}]},
        },
        "uses": [
            {
                "parameter": "text/w",
                "input": "x",
                "activation_policy": "AllowA4",
                "auxiliaries": {"activation_input_divisor": {"object": "s"}},
            },
            {"parameter": "text/v", "input": "x"},
        ],
        "metadata": {"name": "toy"},
        "files": [{"path": None, "payload_bytes": 516}],
    }


PAYLOAD = bytes(range(256)) + bytes(range(64)) + bytes(192) + struct.pack("<f", 2.5)


def entry_bytes(root: Any, payload: bytes = PAYLOAD, id: bytes = ID) -> bytes:
    """An entry file; `root` is JSON values or the text itself."""
    text = root if isinstance(root, bytes) else json.dumps(root).encode()
    start = -(-(32 + len(text)) // PAGE) * PAGE
    head = b"NINFER\0\3" + struct.pack("<Q", len(text)) + id + text
    return head + bytes(start - len(head)) + payload


def part_bytes(index: int, payload: bytes, id: bytes = ID) -> bytes:
    head = b"NINPRT\0\3" + struct.pack("<Q", index) + id
    return head + bytes(PAGE - len(head)) + payload
