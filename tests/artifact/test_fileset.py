"""Division into files and the JSON reserve, against a straightforward reading of the rules."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.artifact import Binding, Component, Directory, Part, TensorObject
from ninfer.artifact.directory import render
from ninfer.artifact.fileset import divide, lay_out
from ninfer.errors import ArtifactError

from . import build

PAGE = 4096


def _up(x: int) -> int:
    return -(-x // PAGE) * PAGE


def _oracle(root: dict[str, Any], payload: int, name: str, limit: int) -> tuple[bytes, list[dict[str, Any]]]:
    """Sections 1.3 and 1.4, step by step."""

    def encode(files: list[dict[str, Any]]) -> bytes:
        return json.dumps(root | {"files": files}, separators=(",", ":"), ensure_ascii=False).encode()

    reserve = _up(32 + len(encode([{"path": None, "payload_bytes": payload}]))) - 32
    while True:
        start = 32 + reserve
        if start + payload <= limit:
            files = [{"path": None, "payload_bytes": payload}]
        else:
            first, rest = (limit - start) // PAGE * PAGE, (limit - PAGE) // PAGE * PAGE
            files, left = [{"path": None, "payload_bytes": first}], payload - first
            while left:
                size = min(left, rest)
                files.append({"path": f"{name}.part-{len(files):04}", "payload_bytes": size})
                left -= size
        text = encode(files)
        if len(text) <= reserve:
            return text + b" " * (reserve - len(text)), files
        reserve = _up(32 + len(text)) - 32


def _big(payload: int, name_length: int = 1) -> Directory:
    return Directory(
        {"text": Component({"n": "x" * name_length})},
        {"w": TensorObject("w", (payload,), "opaque", "opaque", 0, payload)},
        {},
    )


@given(st.integers(1, 40 * PAGE), st.integers(1, 5000), st.integers(PAGE * 3, PAGE * 60))
@settings(max_examples=300, deadline=None)
def test_text_is_byte_identical(payload: int, name_length: int, limit: int) -> None:
    directory = _big(payload, name_length)
    text, found = lay_out(directory, "x.ninfer", limit)
    expected, files = _oracle(render(directory), payload, "x.ninfer", limit)
    assert text == expected
    assert (32 + len(text)) % PAGE == 0
    assert [{"path": entry.path, "payload_bytes": entry.payload_bytes} for entry in found.files] == files


def test_the_reserve_grows_when_many_files_need_more_room() -> None:
    """Whatever the length of the rest, the text fits its own reserve, also where a repetition was needed."""
    repeated = 0
    for length in range(3600, 4200, 7):
        directory = _big(400 * PAGE, length)
        text, _ = lay_out(directory, "x.ninfer", PAGE * 20)
        assert text == _oracle(render(directory), 400 * PAGE, "x.ninfer", PAGE * 20)[0]
        repeated += len(text) > 4064
    assert repeated


def test_member_order() -> None:
    text, _ = lay_out(build.directory(), "x.ninfer")
    root = json.loads(text)
    order = ["components", "objects", "bindings", "uses", "metadata", "provenance", "files"]
    assert list(root) == order
    assert list(root["objects"][0]) == ["id", "encoding", "offset", "bytes", "kind"]
    assert list(root["objects"][1]) == ["id", "shape", "format", "layout", "offset", "bytes", "kind"]
    assert list(root["uses"][1]) == ["parameter", "input", "activation_policy", "auxiliaries"]
    assert list(root["uses"][2]) == ["parameter", "input"]
    assert list(root["files"][0]) == ["path", "payload_bytes"]
    assert root["bindings"]["text/c"] == {"object": "weight/1"}
    assert root["bindings"]["text/a"] == {"parts": [{"object": "weight/0", "range": [0, 512]}]}
    assert "toy – ü".encode() in text
    assert b"9.999999974752427e-07" in text
    bare = json.loads(lay_out(_big(1), "x.ninfer")[0])
    assert (bare["metadata"], bare["provenance"], bare["uses"]) == ({}, {}, [])


@pytest.mark.parametrize(("start", "limit"), [(8192, 8192), (4096, 4095), (4096, 8191), (4096, 4097)])
def test_limits_that_leave_no_room(start: int, limit: int) -> None:
    with pytest.raises(ArtifactError, match="limit"):
        divide(10**6, start, "x", limit)


def test_division_at_the_default_limit() -> None:
    files = divide(70_000_000_000, 8192, "x.ninfer", 32_000_000_000)
    assert [entry.path for entry in files] == [None, "x.ninfer.part-0001", "x.ninfer.part-0002"]
    assert files[0].payload_bytes == (32_000_000_000 - 8192) // PAGE * PAGE
    assert sum(entry.payload_bytes for entry in files) == 70_000_000_000


def test_faulty_directories_are_refused_before_anything_is_written() -> None:
    good = build.directory()
    weight = good.objects["weight/0"]
    for bad, message in [
        (replace(good, components={}), "lacks the component 'text'"),
        (replace(good, objects={**good.objects, "weight/0": replace(weight, offset=0)}), "overlaps"),
        (
            replace(good, objects={**good.objects, "weight/0": replace(weight, id="other")}),
            "other|does not exist",
        ),
        (replace(good, bindings={**good.bindings, "text/a": Binding((Part("w", 0, 1),))}), "does not exist"),
        (
            replace(
                good, bindings={**good.bindings, "text/c": Binding((Part("weight/1", 0, 1),), whole=True)}
            ),
            "claims a whole object",
        ),
        (replace(good, metadata={"x": float("nan")}), "cannot be written as JSON"),
        (replace(good, provenance={"x": object()}), "cannot be written as JSON"),
    ]:
        with pytest.raises(ArtifactError, match=message):
            lay_out(bad, "x.ninfer")
