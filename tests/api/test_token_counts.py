"""Counting a corpus's tokens: the same as encoding it whole, and what is no text is told or left out."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.api import token_counts
from ninfer.api.loading import load_frontend
from ninfer.api.token_counts import Skipped, count_tokens, save_counts
from ninfer.artifact import Artifact
from ninfer.convert.proposal import read_counts
from ninfer.errors import OptionError
from ninfer.frontend import Frontend

ROOT = Path(__file__).parents[2]
ROWS = 8192
CHAT = [
    {"role": "user", "content": "How much is 2 + 2?"},
    {"role": "assistant", "content": "It is 4, <|im_end|> as every child knows."},
]


@pytest.fixture(scope="module")
def frontend() -> Frontend:
    with Artifact.open(ROOT / "models" / "ninfer-nano.ninfer") as artifact:
        return load_frontend(artifact)


def expected(frontend: Frontend, *texts: str) -> dict[int, int]:
    return dict(Counter(token for text in texts for token in frontend.encode(text)))


def counted(frontend: Frontend, *paths: Path) -> dict[int, int]:
    totals = count_tokens(frontend, paths, ROWS).totals
    return {int(token): int(totals[token]) for token in np.flatnonzero(totals)}


def test_files_and_folders(frontend: Frontend, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("Once upon a time, ")
    (tmp_path / "b.md").write_bytes("\ufeffThere was – a Käse\r\n\r\n".encode())
    (tmp_path / "deep" / "er" / "c").write_text("<|im_start|>")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_text("never")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("never")
    calls: list[tuple[str, int, int]] = []
    found = count_tokens(frontend, [tmp_path], ROWS, lambda *call: calls.append(call))
    texts = ("Once upon a time, ", "There was – a Käse\r\n\r\n", "<|im_start|>")
    assert {int(t): int(found.totals[t]) for t in np.flatnonzero(found.totals)} == expected(frontend, *texts)
    size = sum(len(text.encode()) for text in texts) + 3
    assert (found.files, found.bytes, found.skipped) == (4, size, [])
    assert found.tokens == sum(expected(frontend, *texts).values())
    assert calls[-1] == ("counting tokens", size, size)
    # However a file is reached, it counts once.
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    (tmp_path / "deep" / "again.txt").symlink_to(tmp_path / "a.txt")
    os.link(tmp_path / "a.txt", tmp_path / "z.txt")
    assert counted(frontend, tmp_path / "a.txt", tmp_path, tmp_path / "deep") == expected(frontend, *texts)


def test_conversations(frontend: Frontend, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    lines = [
        {"messages": CHAT},
        CHAT,
        {"messages": CHAT, "tools": tools},
        {"text": "Plain <|im_end|>"},
        "Word",
    ]
    path = tmp_path / "chat.JSONL"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n  \n")
    wanted = Counter(expected(frontend, "Plain <|im_end|>", "Word"))
    for given_tools in (None, None, tools):
        prompt = frontend.render(CHAT, tools=given_tools, add_generation_prompt=False)
        wanted.update(prompt.tokens)
    assert counted(frontend, path) == wanted
    # The template's control tokens are tokens, their spellings in a message are not.
    control = frontend.render(CHAT, add_generation_prompt=False).tokens[0]
    assert frontend.decode([control], keep_special=True) == "<|im_start|>"
    assert wanted[control] >= 6


@given(st.text(st.sampled_from(" \n\r\t\u2028ab1_.,'sé\u0301中😀\x1c\x85"), max_size=40))
@settings(deadline=None, max_examples=300)
def test_cuts_change_no_token(frontend: Frontend, text: str) -> None:
    whole = frontend.encode(text)
    for match in token_counts._CUT.finditer(text):
        at = match.start()
        assert frontend.encode(text[:at]) + frontend.encode(text[at:]) == whole


def test_a_long_text_is_counted_in_pieces(
    frontend: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = sorted((ROOT / "bench" / "heldout").glob("*.txt"))
    texts = [path.read_text() for path in corpus]
    monkeypatch.setattr(token_counts, "PIECE", 1000)
    monkeypatch.setattr(token_counts, "_READ", 333)  # in the middle of characters, too
    monkeypatch.setattr(token_counts, "_BATCH", 20_000)
    assert counted(frontend, *corpus) == expected(frontend, *texts)
    path = tmp_path / "one.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert counted(frontend, path) == expected(frontend, *texts)


def test_a_huge_line_takes_little_memory(frontend: Frontend, tmp_path: Path) -> None:
    (tmp_path / "line").write_text("aé" * 2_000_000)
    tracemalloc.start()
    found = count_tokens(frontend, [tmp_path / "line"], ROWS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tokens > 100_000
    assert peak < 200 << 20


BAD = {
    "binary.bin": (b"\x7fELF\0\0text", "byte 4 is NUL; it is no text"),
    "latin.txt": ("schön".encode("latin-1"), r"it is not valid UTF-8 \(byte 3\)"),
    "cut.txt": ("a long ä".encode()[:-1], r"it is not valid UTF-8 \(byte 7\)"),
    "surrogate.txt": (b"ab\xed\xa0\x80", r"it is not valid UTF-8 \(byte 2\)"),
    "late.txt": (b"x" * 300_000 + b"\xff", r"it is not valid UTF-8 \(byte 300000\)"),
    "split.txt": (b"x" * ((1 << 18) - 1) + b"\xc3(", r"it is not valid UTF-8 \(byte 262143\)"),
    "form.jsonl": (b'"fine"\n{"prompt": "x"}\n', r'line 2: expected \{"messages"'),
    "json.jsonl": (b'"fine"\n\n{"text": \n', "line 3: "),
    "number.jsonl": (b"17\n", "line 1: expected"),
    "surrogate.jsonl": (b'"\\ud800"\n', "line 1: "),
    "chat.jsonl": (b'{"messages": [{"role": "nobody", "content": "x"}]}\n', "line 1: "),
    "empty.jsonl": (b'{"messages": []}\n', "line 1: "),
    "tools.jsonl": (b'{"messages": [{"role": "user", "content": "x"}], "tools": "add"}\n', "line 1: 'tools'"),
    "chat2.jsonl": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', "line 1: "),
    "deep.jsonl": (b"[" * 200_000 + b"\n", "line 1: "),
    "bytes.jsonl": (b'"\xff"\n', "line 1: "),
    "utf16.jsonl": ('"text"\n'.encode("utf-16"), "line 1: "),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_text(frontend: Frontend, tmp_path: Path, name: str) -> None:
    data, message = BAD[name]
    (tmp_path / "fine.txt").write_text("fine words")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(OptionError, match=f"corpus .*{name} cannot be counted: {message}"):
        count_tokens(frontend, [tmp_path / "fine.txt", tmp_path / name], ROWS)
    found = count_tokens(frontend, [tmp_path], ROWS)
    assert [one.path.name for one in found.skipped] == [name]
    assert found.files == 1
    # Nothing of it has been counted.
    assert found.tokens == len(frontend.encode("fine words"))


def test_a_bad_end_takes_back_what_was_counted(
    frontend: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_counts, "_BATCH", 1000)
    monkeypatch.setattr(token_counts, "_READ", 100)
    monkeypatch.setattr(token_counts, "PIECE", 100)
    (tmp_path / "a").write_text("before " * 20)
    (tmp_path / "b").write_bytes(b"wrong " * 2000 + b"\xff")
    (tmp_path / "c").write_text("behind " * 20)
    assert counted(frontend, tmp_path) == expected(frontend, "before " * 20, "behind " * 20)


def test_places_that_cannot_be_read(frontend: Frontend, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path / "none", "cannot be read: No such file"),
        (tmp_path / "circle", "cannot be read: Too many levels of symbolic links"),
        (tmp_path / "pipe", "is neither a file nor a folder"),
        (Path("/dev/zero"), "is neither a file nor a folder"),
        (Path("a\0b"), "cannot be read: "),
    ]:
        with pytest.raises(OptionError, match=message):
            count_tokens(frontend, [path], ROWS)
    (tmp_path / "text").write_text("text")
    found = count_tokens(frontend, [tmp_path], ROWS)
    assert found.files == 1
    assert found.skipped == [Skipped(tmp_path / "circle", "Too many levels of symbolic links")]


def test_a_file_without_permission(
    frontend: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "text").write_text("text")
    monkeypatch.setattr(token_counts, "open", refuse, raising=False)  # who runs tests as root may read all
    with pytest.raises(OptionError, match="text cannot be counted: Permission denied"):
        count_tokens(frontend, [tmp_path / "text"], ROWS)
    with pytest.raises(OptionError, match=r"no tokens: .* \(left out: .*text, Permission denied\)"):
        count_tokens(frontend, [tmp_path], ROWS)


@pytest.mark.parametrize("data", [None, b"", b"\xef\xbb\xbf"])
def test_an_empty_corpus(frontend: Frontend, tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "text").write_bytes(data)
    with pytest.raises(OptionError, match="the corpus has no tokens: "):
        count_tokens(frontend, [tmp_path], ROWS)


def test_a_line_may_be_too_long(frontend: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counts, "LONGEST_LINE", 10)
    path = tmp_path / "x.jsonl"
    path.write_text('"' + "a" * 7 + '"\n"' + "a" * 9 + '"\n')
    with pytest.raises(OptionError, match="line 2 has more than 10 bytes"):
        count_tokens(frontend, [path], ROWS)


def test_counts_are_a_ranking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.array([3, 0, 2**40], dtype=np.int64)
    save_counts(tmp_path / "counts", counts)
    assert (tmp_path / "counts").read_bytes() == b"".join(int(c).to_bytes(8, "little") for c in counts)
    assert read_counts(tmp_path / "counts", 3).tolist() == counts.tolist()
    with pytest.raises(OptionError, match="exists already"):
        save_counts(tmp_path / "counts", counts)
    with pytest.raises(OptionError, match="cannot be written: No such file"):
        save_counts(tmp_path / "none" / "counts", counts)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_counts.os, "fsync", fail)
    with pytest.raises(OptionError, match="more cannot be written: No space left on device"):
        save_counts(tmp_path / "more", counts)
    assert [path.name for path in tmp_path.iterdir()] == ["counts"]
