"""Every structural rule of the directory: one broken file each, refused when it is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ninfer.artifact import Artifact
from ninfer.errors import ArtifactError

from . import build

Root = dict[str, Any]
BIG = 2**64


def _open(tmp_path: Path, root: Root | bytes) -> Artifact:
    path = tmp_path / "x.ninfer"
    path.write_bytes(build.entry_bytes(root))
    return Artifact.open(path)


def _set(*keys: Any) -> Callable[[Any], Callable[[Root], None]]:
    """`_set("files", 0, "path")(value)` changes that place of the root record."""

    def with_value(value: Any) -> Callable[[Root], None]:
        def change(root: Root) -> None:
            target: Any = root
            for key in keys[:-1]:
                target = target[key]
            target[keys[-1]] = value

        return change

    return with_value


def _drop(*keys: Any) -> Callable[[Root], None]:
    def change(root: Root) -> None:
        target: Any = root
        for key in keys[:-1]:
            target = target[key]
        del target[keys[-1]]

    return change


FILES, OBJECTS = _set("files"), _set("objects")
ENTRY = {"path": None, "payload_bytes": 516}
TEXT = ("components", "text")
W, R = ("objects", 1), ("objects", 0)
USE = ("uses", 0)
TWO_FILES = [{"path": None, "payload_bytes": 500}, {"path": "p", "payload_bytes": 16}]


def _second(path: Any) -> Callable[[Root], None]:
    return FILES([TWO_FILES[0], {"path": path, "payload_bytes": 16}])


CASES: list[tuple[str, Callable[[Root], None], str]] = [
    ("root member missing", _drop("uses"), "root record lacks the member 'uses'"),
    ("root member unknown", _set("extra")(1), "unknown member 'extra'"),
    ("files empty", FILES([]), "'files' must not be empty"),
    ("files no array", FILES({}), "'files' must be an array"),
    ("first path", _set("files", 0, "path")("x"), r"files\[0\].*must be null"),
    ("file member", _set("files", 0, "size")(1), "unknown member 'size'"),
    ("file size zero", _set("files", 0, "payload_bytes")(0), r"files\[0\] payload_bytes must be an integer"),
    ("file size float", _set("files", 0, "payload_bytes")(516.0), "must be an integer"),
    ("file size bool", _set("files", 0, "payload_bytes")(True), "must be an integer.*true"),
    ("file size text", _set("files", 0, "payload_bytes")("516"), "must be an integer"),
    ("file size 2^64", _set("files", 0, "payload_bytes")(BIG), "must be an integer"),
    ("file sizes overflow", FILES([ENTRY, {"path": "p", "payload_bytes": BIG - 1}]), "more than 2.64"),
    ("sibling null", _second(None), r"files\[1\] path must be a nonempty string"),
    ("sibling empty", _second(""), "nonempty string"),
    ("sibling NUL", _second("a\0b"), "without NUL"),
    ("sibling slash", _second("a/b"), "plain name"),
    ("sibling backslash", _second("a\\b"), "plain name"),
    ("sibling dot", _second("."), "plain name"),
    ("sibling dots", _second(".."), "plain name"),
    ("sibling is entry", _second("x.ninfer"), "already another file"),
    ("sibling twice", FILES([*TWO_FILES, TWO_FILES[1]]), "already another file"),
    ("objects empty", OBJECTS([]), "'objects' must not be empty"),
    ("object no object", OBJECTS([7]), r"objects\[0\] must be an object, not 7"),
    ("object kind", _set(*W, "kind")("blob"), "kind 'tensor' or 'resource', not 'blob'"),
    ("object kind missing", _drop(*W, "kind"), "not null"),
    ("object kind list", _set(*W, "kind")([]), "not an array"),
    ("object id empty", _set(*W, "id")(""), "nonempty string"),
    ("object id number", _set(*W, "id")(5), "nonempty string"),
    ("object id NUL", _set(*W, "id")("a\0"), "without NUL"),
    ("object id twice", _set(*W, "id")("r"), "appears twice"),
    ("tensor member unknown", _set(*W, "divisors")(1), "unknown member 'divisors'"),
    ("tensor member missing", _drop(*W, "layout"), "lacks the member 'layout'"),
    ("tensor with encoding", _set(*W, "encoding")("x"), "unknown member 'encoding'"),
    ("resource with shape", _set(*R, "shape")([3]), "unknown member 'shape'"),
    ("rank", _set(*W, "shape")([1] * 17), "17 dimensions"),
    ("dimension zero", _set(*W, "shape")([4, 0]), "object 'w' dimension"),
    ("dimension float", _set(*W, "shape")([4, 8.0]), "object 'w' dimension"),
    ("shape null", _set(*W, "shape")(None), "shape must be an array"),
    ("too many elements", _set(*W, "shape")([2**32, 2**32]), "more than 2.64 - 1 elements"),
    ("offset negative", _set(*R, "offset")(-1), "object 'r' offset"),
    ("offset huge", _set(*W, "offset")(BIG - 1), "beyond the payload"),
    ("bytes zero", _set(*R, "bytes")(0), "object 'r' bytes"),
    ("overlap", _set(*R, "bytes")(257), "object 'w' at 256 overlaps"),
    ("order", _set(*R, "offset")(400), "overlaps or precedes"),
    ("beyond", _set("objects", 2, "bytes")(5), "object 's' ends at 517, beyond the payload of 516"),
    ("no text", _drop(*TEXT), "lacks the component 'text'"),
    ("component no object", _set(*TEXT)(1), "component 'text' must be an object"),
    ("component member", _set(*TEXT, "kind")(1), "unknown member 'kind'"),
    ("component config", _drop(*TEXT, "config"), "lacks the member 'config'"),
    ("config no object", _set(*TEXT, "config")([]), "config must be an object"),
    ("target missing", _drop("components", "mtp", "target"), "component 'mtp' lacks its target"),
    ("target unknown", _set("components", "mtp", "target")("vision"), "no component"),
    ("target itself", _set("components", "mtp", "target")("mtp"), "must have target 'text'"),
    ("target null", _set("components", "mtp", "target")(None), "nonempty string"),
    ("resource absent", _set(*TEXT, "resources", "tokenizer.json")("q"), "no object"),
    ("resource tensor", _set(*TEXT, "resources", "tokenizer.json")("w"), "a tensor"),
    ("resource number", _set(*TEXT, "resources", "tokenizer.json")(1), "nonempty string"),
    ("proposal elsewhere", _set("components", "mtp", "proposal")({"domain": "full"}), "only 'text' has one"),
    ("proposal domain", _set(*TEXT, "proposal")({"domain": "half"}), "'full' or 'indexed', not 'half'"),
    ("proposal full rows", _set(*TEXT, "proposal")({"domain": "full", "rows": 3}), "unknown member 'rows'"),
    ("proposal no rows", _set(*TEXT, "proposal")({"domain": "indexed"}), "lacks the member 'rows'"),
    ("proposal zero rows", _set(*TEXT, "proposal")({"domain": "indexed", "rows": 0}), "proposal rows"),
    ("proposal null", _set(*TEXT, "proposal")(None), "proposal must be an object"),
    ("binding unknown", _set("bindings", "text/w")({"object": "q"}), "binding 'text/w'.*does not exist"),
    ("binding resource", _set("bindings", "text/w")({"object": "r"}), "resource, not a tensor"),
    ("binding both", _set("bindings", "text/w")({"object": "w", "parts": []}), "unknown member 'parts'"),
    ("binding neither", _set("bindings", "text/w")({}), "lacks the member 'parts'"),
    ("binding no parts", _set("bindings", "text/w")({"parts": []}), "must not be empty"),
    ("binding name", _set("bindings", "")({"object": "w"}), "parameter name must be a nonempty"),
    *(
        (
            f"range {limits}",
            _set("bindings", "text/v", "parts", 0, "range")(limits),
            "binding 'text/v'.*range",
        )
        for limits in ([], [0], [0, 1, 2], [0, 33], [4, 4], [5, 4], [-1, 3], [0.0, 3], [True, 3], None, "ab")
    ),
    ("part member", _set("bindings", "text/v", "parts", 0, "rows")(1), "unknown member 'rows'"),
    ("uses no array", _set("uses")({}), "'uses' must be an array"),
    ("use parameter", _set(*USE, "parameter")("text/z"), "which 'bindings' lacks"),
    ("use input", _set(*USE, "input")(""), "input must be a nonempty string"),
    ("use policy", _set(*USE, "activation_policy")("AllowA2"), "must be one of A16Only, AllowA8, AllowA4"),
    ("use policy null", _set(*USE, "activation_policy")(None), "must be one of"),
    ("use policy list", _set(*USE, "activation_policy")([]), "must be one of"),
    ("use member", _set(*USE, "policy")("A16Only"), "unknown member 'policy'"),
    ("use twice", _set("uses", 1, "parameter")("text/w"), "repeats the use"),
    ("auxiliary unknown", _set(*USE, "auxiliaries")({"d": {"object": "q"}}), "auxiliary 'd'.*not exist"),
    ("auxiliary role", _set(*USE, "auxiliaries")({"": {"object": "s"}}), "nonempty string"),
    ("metadata", _set("metadata")([]), "metadata must be an object"),
    ("metadata null", _set("metadata")(None), "metadata must be an object"),
    ("name empty", _set("metadata", "name")(""), "metadata 'name'"),
    ("name number", _set("metadata", "name")(1), "metadata 'name'"),
    ("provenance", _set("provenance")("x"), "provenance must be an object"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_broken_rules(tmp_path: Path, change: Callable[[Root], None], message: str) -> None:
    root = build.root()
    change(root)
    with pytest.raises(ArtifactError, match=message) as failure:
        _open(tmp_path, root)
    assert "\n" not in str(failure.value)


def test_optional_members(tmp_path: Path) -> None:
    root = build.root()
    del root["metadata"], root["components"]["text"]["resources"], root["components"]["text"]["proposal"]
    root["uses"] = []
    root["provenance"] = {"a": [1.5, None, {"b": "c"}]}
    with _open(tmp_path, root) as artifact:
        assert artifact.metadata == {}
        assert artifact.provenance == root["provenance"]


def test_unknown_formats_and_component_names_are_kept(tmp_path: Path) -> None:
    root = build.root()
    root["objects"][1]["format"] = "q3_g64"
    root["components"]["decision"] = {"config": {}, "target": "text"}
    with _open(tmp_path, root) as artifact:
        assert artifact.tensor("w").format == "q3_g64"
        assert "decision" in artifact.components


def test_features_do_not_mix(tmp_path: Path) -> None:
    root = build.root()
    # text/w covers the object, so a drafter may read some of it; the proposal head too.
    root["bindings"]["mtp/x"] = {"parts": [{"object": "w", "range": [3, 9]}]}
    root["bindings"]["proposal/head"] = {"object": "w"}
    _open(tmp_path, root).close()
    root["bindings"]["text/w"] = {"parts": [{"object": "w", "range": [0, 8]}]}
    del root["bindings"]["proposal/head"]
    with pytest.raises(ArtifactError, match="object 'w' mixes private data of mtp, text"):
        _open(tmp_path, root)
    root["bindings"]["mtp/x"] = {
        "parts": [{"object": "w", "range": [0, 8]}, {"object": "w", "range": [24, 32]}]
    }
    _open(tmp_path, root).close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff{}", r"not UTF-8 \(byte 0\)"),
        (b"{", "not valid JSON"),
        (b"null", "root record must be an object, not null"),
        (b"\xef\xbb\xbf{}", "not valid"),
        (b" " * 50, "not valid JSON"),
        (json.dumps(build.root()).encode() + b"{}", "not valid JSON"),
        (b'{"objects":1,"objects":1}', "duplicate member 'objects'"),
        (b'{"a":{"\\u0062":1,"b":2}}', "duplicate member 'b'"),
        (b'{"a":NaN}', "NaN is no JSON number"),
        (b'{"a":[-Infinity]}', "-Infinity is no JSON number"),
        (b'{"a":1e999}', "the number 1e999 is out of range"),
        (b'{"a":' + b"9" * 5000 + b"}", "the integer 9{40}... is out of range"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":"\x01"}', "not valid JSON"),
    ],
)
def test_bad_json(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as failure:
        _open(tmp_path, text)
    assert len(str(failure.value)) < 400


@pytest.mark.parametrize("place", ["config", "metadata", "provenance"])
def test_open_objects_have_limits(tmp_path: Path, place: str) -> None:
    deep: Any = 1
    for _ in range(99):
        deep = {"a": [deep]} if isinstance(deep, int) else [deep]
    for value, message in (
        ({"a": deep}, "nested more than 100 levels"),
        ({"a": "\ud800"}, "unpaired surrogate"),
        ({"\udc00": 1}, "unpaired surrogate"),
    ):
        root = build.root()
        (root["components"]["text"] if place == "config" else root)[place] = value
        with pytest.raises(ArtifactError, match=message):
            _open(tmp_path, root)


def test_surrogates_in_ids(tmp_path: Path) -> None:
    root = build.root()
    root["bindings"]["text/\ud83d"] = {"object": "w"}
    with pytest.raises(ArtifactError, match="unpaired surrogate"):
        _open(tmp_path, root)
    root["bindings"] = {"text/w": {"object": "w"}, "text/v": {"object": "w"}, "text/😀": {"object": "w"}}
    with _open(tmp_path, root) as artifact:
        assert "text/😀" in artifact.bindings
