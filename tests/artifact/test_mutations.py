"""Damaged files of every kind: reading one works or fails with our own error, never otherwise."""

from __future__ import annotations

import copy
import io
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer import formats
from ninfer.artifact import Artifact, TensorObject, layouts
from ninfer.cli import inspect
from ninfer.errors import NInferError

from . import build

Files = dict[str, bytes]
ENTRY = "x.ninfer"
CASES = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Files]:
    """The same artifact in one file and in three."""
    directory = build.directory()
    sets = []
    for limit in (10**9, 12288):
        folder = tmp_path_factory.mktemp("original")
        build.write(folder / ENTRY, directory, build.contents(directory), limit)
        sets.append({path.name: path.read_bytes() for path in folder.iterdir()})
    return sets


def _use_everything(folder: Path, files: Files) -> bool:
    """Read all that a program could read; True if nothing was refused."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    refusals: list[str] = []
    try:
        with Artifact.open(folder / ENTRY) as artifact:
            for action in _actions(artifact):
                try:
                    action()
                except NInferError as error:
                    refusals.append(str(error))
    except NInferError as error:
        refusals.append(str(error))
    for text in refusals:
        assert text.isprintable()
        assert len(text) < 600
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = inspect.main([str(folder / ENTRY), "--objects", "--bindings"])
        assert inspect.main([str(folder / ENTRY), "--objects", "--bindings", "--json"]) == code
    assert code in (0, 1)
    assert bool(errors.getvalue()) == (code == 1)
    return not refusals


def _actions(artifact: Artifact) -> Iterator[Callable[[], object]]:
    yield lambda: artifact.read_range(0, artifact.payload_bytes)
    for name in artifact.bindings:
        yield lambda name=name: artifact.parameter(name)
    for component, record in artifact.components.items():
        for role in record.resources:
            yield lambda component=component, role=role: artifact.resource(component, role)
    for record in artifact.objects.values():
        if isinstance(record, TensorObject):
            yield lambda record=record: _decode(artifact, record)


def _decode(artifact: Artifact, record: TensorObject) -> None:
    data = artifact.object_bytes(record.id)
    if formats.get(record.format).kind == "direct":
        layouts.decode_direct(record.format, record.shape, data)
    else:
        layouts.decode_rows(record.format, record.shape, data, 0, record.shape[0])


def test_the_originals_are_whole(originals: list[Files], folder: Path) -> None:
    assert [len(files) for files in originals] == [1, 3]
    assert all(_use_everything(folder, files) for files in originals)


@given(data=st.data())
@CASES
def test_flipped_bytes(data: st.DataObject, originals: list[Files], folder: Path) -> None:
    files = dict(data.draw(st.sampled_from(originals)))
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(sorted(files)))
        content = bytearray(files[name])
        header, text = st.integers(0, 31), st.integers(32, min(len(content), 3200) - 1)
        at = data.draw(st.one_of(header, text, st.integers(0, len(content) - 1)))
        content[at] = data.draw(st.integers(0, 255))
        files[name] = bytes(content)
    _use_everything(folder, files)


@given(data=st.data())
@CASES
def test_lengths_and_missing_files(data: st.DataObject, originals: list[Files], folder: Path) -> None:
    files = dict(data.draw(st.sampled_from(originals)))
    name = data.draw(st.sampled_from(sorted(files)))
    content = files[name]
    change = data.draw(st.sampled_from(["cut", "cut early", "grow", "remove", "swap", "drop middle"]))
    if change == "cut":
        files[name] = content[: data.draw(st.integers(0, len(content)))]
    elif change == "cut early":
        files[name] = content[: data.draw(st.integers(0, 64))]
    elif change == "grow":
        files[name] = content + bytes(data.draw(st.integers(1, 9000)))
    elif change == "remove":
        del files[name]
    elif change == "swap":
        files[name] = files[data.draw(st.sampled_from(sorted(files)))]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        files[name] = content[:at] + content[at + data.draw(st.integers(1, 4096)) :]
    _use_everything(folder, files)


SCALARS: list[Any] = [None, True, False, 0, 1, -1, 2, 255, 256, 2**31, 2**53, 2**63, 2**64 - 1, 2**64, 10**30]
SCALARS += [
    0.0,
    1.0,
    -0.5,
    1e300,
    "",
    "text",
    "weight/0",
    "weight/9",
    "tensor",
    "resource",
    "nvfp4",
    "ggml_k",
    "a\0",
]
VALUES = st.one_of(
    st.sampled_from(SCALARS),
    st.text(max_size=8),
    st.integers(-300, 300),
    st.sampled_from(
        [[], {}, [1], [[1]], {"object": "weight/0"}, {"parts": []}, [0, 1], [1] * 17, {"domain": "full"}]
    ),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _entry(files: Files, root: Any, text: bytes | None = None) -> bytes:
    """The entry with another root record, its payload unchanged."""
    content = files[ENTRY]
    (json_bytes,) = struct.unpack("<Q", content[8:16])
    payload = content[32 + json_bytes :]
    return build.entry_bytes(json.dumps(root).encode() if text is None else text, payload, build.ID)


def _root(files: Files) -> Any:
    (json_bytes,) = struct.unpack("<Q", files[ENTRY][8:16])
    return json.loads(files[ENTRY][32 : 32 + json_bytes])


@given(data=st.data())
@settings(CASES, max_examples=500)
def test_changed_members(data: st.DataObject, originals: list[Files], folder: Path) -> None:
    files = dict(data.draw(st.sampled_from(originals)))
    root = _root(files)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(_places(root))))
        parent = root
        for key in path[:-1]:
            parent = parent[key]
        key = path[-1]
        change = data.draw(st.sampled_from(["replace", "nudge", "remove", "rename", "repeat", "move"]))
        if change == "nudge" and type(parent[key]) is int:
            parent[key] += data.draw(st.sampled_from([-256, -64, -1, 1, 2, 64, 256, 4096]))
        elif change == "remove":
            del parent[key]
        elif change == "rename" and isinstance(parent, dict):
            parent[data.draw(st.text(max_size=6))] = parent.pop(key)
        elif change == "repeat" and isinstance(parent, list):
            parent.insert(data.draw(st.integers(0, len(parent))), copy.deepcopy(parent[key]))
        elif change == "move":
            source: Any = root
            for step in data.draw(st.sampled_from(list(_places(root)))):
                source = source[step]
            parent[key] = copy.deepcopy(source)
        else:
            # A copy: the strategy may hand out one object again, and later changes go into it.
            parent[key] = copy.deepcopy(data.draw(VALUES))
        if not isinstance(root, dict) or not root:
            break
    files[ENTRY] = _entry(files, root)
    _use_everything(folder, files)


@pytest.mark.parametrize("name", ["\x1f", "a\nb", "\u2028"])
def test_control_characters_in_a_parts_name(name: str, originals: list[Files], folder: Path) -> None:
    [files] = [dict(one) for one in originals if len(one) == 3]
    root = _root(files)
    root["files"][2]["path"] = name
    files[ENTRY] = _entry(files, root)
    _use_everything(folder, files)


@given(data=st.data())
@CASES
def test_changed_text(data: st.DataObject, originals: list[Files], folder: Path) -> None:
    files = dict(data.draw(st.sampled_from(originals)))
    text = json.dumps(_root(files)).encode()
    pieces = [
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"NaN",
        b"1e999",
        b"-",
        b".5",
        b"\xff",
        b"\0",
        b"9" * 50,
    ]
    pieces += [
        b"[" * 3000,
        b'{"a":' * 3000,
        b'"\\ud800"',
        b"null",
        b"true",
        b" ",
        b'"files":[],',
        b"/*",
        b"\xef\xbb\xbf",
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 5))
        text = text[:at] + data.draw(st.sampled_from(pieces)) + text[at + gone :]
    files[ENTRY] = _entry(files, None, text)
    _use_everything(folder, files)
