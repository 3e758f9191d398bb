"""Corpus manifests: what they may say, and the sentence for everything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from ninfer.api.corpus import read_manifest, read_text
from ninfer.errors import NInferError

SMALL = Path(__file__).resolve().parents[2] / "bench" / "corpus" / "manifest.json"


def manifest() -> dict[str, Any]:
    return {
        "corpus_id": "test-v1",
        "streams": [
            {"id": "b", "domain": "two", "path": "texts/b.txt"},
            {"id": "a", "domain": "one", "path": "a.txt", "note": "further members are ignored"},
        ],
        "modes": {"quick": ["a"], "full": ["a", "b"]},
    }


def write(folder: Path, content: Any) -> Path:
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "a.txt").write_text("first\r\n", newline="")
    (folder / "texts" / "b.txt").write_text("第二\n", encoding="utf-8")
    path = folder / "manifest.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_modes_choose_streams_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path, manifest())
    full = read_manifest(path)
    assert (full.id, full.mode, full.source) == ("test-v1", "full", str(path))
    assert [(s.id, s.domain, s.path, s.text) for s in full.streams] == [
        ("a", "one", "a.txt", "first\r\n"),
        ("b", "two", "texts/b.txt", "第二\n"),
    ]
    quick = read_manifest(path, quick=True)
    assert (quick.mode, quick.streams) == ("quick", full.streams[:1])


def change(**members: Any) -> dict[str, Any]:
    return {**manifest(), **members}


def stream(**members: Any) -> dict[str, Any]:
    return change(streams=[{"id": "a", "domain": "one", "path": "a.txt", **members}], modes={"full": ["a"]})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not valid JSON"),
        ("[]", "needs an array 'streams'"),
        ('{"corpus_id": "a", "corpus_id": "b"}', "duplicate member"),
        (change(corpus_id=""), "'corpus_id'"),
        (change(corpus_id=3), "a string 'corpus_id'"),
        (change(streams={}), "an array 'streams'"),
        (change(streams=[3]), "a string 'id'"),
        (change(streams=manifest()["streams"] * 2), "two streams 'b'"),
        (change(modes=[]), "an object 'modes'"),
        (change(modes={"quick": ["a"]}), "an array 'full'"),
        (change(modes={"full": []}), "names no streams"),
        (change(modes={"full": ["c"]}), "names 'c', which is none of its streams"),
        (change(modes={"full": [["a"]]}), "names an array"),
        (change(modes={"full": ["a", "a"]}), "names 'a' twice"),
        (stream(domain="a\nb"), "'domain' of the stream 'a'"),
        (stream(path="../a.txt"), "without '..'"),
        (stream(path="texts/../../a.txt"), "without '..'"),
        (stream(path="/etc/passwd"), "must be relative"),
        (stream(path="texts\\b.txt"), "with /"),
        (stream(path="none.txt"), "none.txt: No such file"),
        (stream(path="texts"), "Is a directory"),
    ],
)
def test_bad_manifests(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(NInferError) as caught:
        read_manifest(write(tmp_path, content))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "is empty"), (b"ab\0c", "contains NUL (character 2)"), (b"abc\xff", "not valid UTF-8 (byte 3)")],
)
def test_bad_texts(tmp_path: Path, data: bytes, words: str) -> None:
    path = write(tmp_path, manifest())
    (tmp_path / "a.txt").write_bytes(data)
    for read in (lambda: read_manifest(path), lambda: read_text(tmp_path / "a.txt")):
        with pytest.raises(NInferError) as caught:
            read()
        assert words in str(caught.value)


def test_one_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("text")
    corpus = read_text(path)
    assert (corpus.id, corpus.mode, corpus.source) == ("custom-mine.txt", "text", str(path))
    assert [(s.id, s.domain, s.path, s.text) for s in corpus.streams] == [
        ("mine.txt", "custom", str(path), "text")
    ]
    with pytest.raises(NInferError, match=r"cannot read the text .*none"):
        read_text(tmp_path / "none")


def test_the_small_corpus_is_whole() -> None:
    corpus = read_manifest(SMALL)
    assert corpus.id == "ninfer-ppl-small-v1"
    domains = {"english_reference", "english_long_form", "chinese_reference", "ninfer_code"}
    assert {s.domain for s in corpus.streams} == domains
    quick = read_manifest(SMALL, quick=True).streams
    assert sorted(s.domain for s in quick) == sorted(domains)
    for s in corpus.streams:
        assert 30_000 <= len(s.text.encode()) <= 60_000
        assert "\r" not in s.text
