"""Readers, selection and overlap of the training texts, on small inputs; the committed held-out texts."""

import gzip
import hashlib
import json
import lzma
import random
import struct
import zlib
from pathlib import Path

import pytest

from bench.tasks import generators
from ninfer.api.corpus import read_manifest
from ninfer.errors import NInferError
from tools.nano import corpus, credits, heldout, readers
from tools.nano.corpus import Read, Repeats, Text, Windows, bench_texts, select, unlike, without_boilerplate
from tools.nano.overlap import WINDOW, window_hashes
from tools.nano.pages import is_english, is_natural, prose_of
from tools.nano.sources import SOURCES, Source

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "public domain", "WordNet-3.0", "PSF-2.0", "PostgreSQL", "MIT", "BSD-2-Clause", "BSD-3-Clause",
    "Apache-2.0",
    "MIT OR Apache-2.0", "Apache-2.0 AND MIT", "Apache-2.0 OR BSD-3-Clause", "Apache-2.0 WITH LLVM-exception",
    "matplotlib", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0",
}  # fmt: skip


def sentences(seed: int, count: int) -> str:
    source = random.Random(seed)
    words = ("the", "cat", "of", "a", "house", "and", "to", "run", "in", "that", "is", "green", "by", "river")
    return " ".join(" ".join(source.choices(words, k=9)).capitalize() + "." for _ in range(count))


class TestPages:
    def test_paragraphs_headings_and_items(self) -> None:
        page = """<html><head><title>x</title><script>var a = 1;</script></head><body>
        <div class="sphinxsidebar"><p>Somewhere else there is a long list of all the pages.</p></div>
        <h1>2.1. Cats<a class="headerlink" href="#c">¶</a></h1>
        <p>The cat’s <b>tail</b> is
        long — it is a fine one.</p><ul><li><p>It sleeps in the sun.</p></li><li>It eats.</li></ul>
        <pre>print(1)</pre><table><tr><td>no table</td></tr></table>
        <dl><dt class="sig sig-object">f(a, b)</dt><dd>Returns what the two of them have in common.</dd></dl>
        <h2>Empty heading</h2></body></html>"""
        assert prose_of(page) == (
            "Cats\n\nThe cat's tail is long -- it is a fine one.\n- It sleeps in the sun.\n- It eats.\n\n"
            "Returns what the two of them have in common."
        )

    def test_unclosed_paragraphs_and_nested_skips(self) -> None:
        page = (
            "<body><p>The first one of the two.<p>The second one of the two."
            "<div class=related><div>a <div>b</div></div></div><p>The last one of them all."
        )
        assert prose_of(page).split("\n\n") == [
            "The first one of the two.", "The second one of the two.", "The last one of them all.",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "natural"),
        [
            ("The function opens the file and returns it.", True),
            ("x = foo_bar(1) + self.baz[2] for all of y", False),
            ("0x00 0x01 0x02 0x03 0x04 0x05 0x06 0x07", False),
            ("Only four words here", False),
        ],
    )
    def test_natural(self, text: str, natural: bool) -> None:
        assert is_natural(text, short=False) is natural

    def test_english(self) -> None:
        assert is_english(sentences(1, 10))
        assert not is_english("Der Hund und die Katze sehen das Haus am Fluss. " * 10)


def r_object(strings: list[str]) -> bytes:
    """R's serialization of a character vector: version 3, big-endian."""
    data = b"X\n" + struct.pack(">III", 3, 0x40201, 0x30500) + struct.pack(">I", 5) + b"UTF-8"
    data += struct.pack(">II", 16, len(strings))
    for string in strings:
        data += struct.pack(">Ii", 0x40009, len(string.encode())) + string.encode()
    return struct.pack(">I", len(data)) + zlib.compress(data)


class TestReaders:
    def test_novels(self, tmp_path: Path) -> None:
        emma = [
            "EMMA",
            "",
            "CHAPTER I",
            "",
            "Emma Woodhouse,",
            "handsome.",
            "",
            "CHAPTER II",
            "",
            "Mr. Weston.",
        ]
        park = ["MANSFIELD PARK", "", "CHAPTER I", "", "About thirty", "years ago."]
        persuasion = ["Persuasion", "", "Chapter 1", "", "Sir Walter."]
        path = tmp_path / "Rdata.rdb"
        path.write_bytes(b"".join(map(r_object, (emma, persuasion, park))))
        assert list(readers.novels(path)) == [
            ("Emma/00", "CHAPTER I\n\nEmma Woodhouse, handsome."),
            ("Emma/01", "CHAPTER II\n\nMr. Weston."),
            ("Mansfield Park/00", "CHAPTER I\n\nAbout thirty\nyears ago."),
        ]

    def test_wordnet(self, tmp_path: Path) -> None:
        path = tmp_path / "data.noun"
        line = '00402308 04 n 02 rest_day 2 change(p) 2 001 @ 0 n 0 | a day of rest; "a quiet one"; "so"  \n'
        path.write_text("  1 a notice\n" + line)
        assert list(readers.wordnet(path)) == [
            ("0000", 'rest day, change (noun): a day of rest. For example: "a quiet one"; "so".')
        ]

    def test_devil_and_jargon(self, tmp_path: Path) -> None:
        path = tmp_path / "x.gz"
        path.write_bytes(
            gzip.compress(b"Preface.\n\nABASEMENT, n.  A mental\nattitude.\n\n    Verse\n    two.\n")
        )
        assert list(readers.devil(path)) == [
            ("000", "ABASEMENT, n. A mental attitude.\n\nVerse\ntwo.\n"[:-1])
        ]
        path.write_bytes(gzip.compress(b"Contents\n\n   :crumb: n.\n\n   Two binary\n   digits; a {quad}.\n"))
        assert list(readers.jargon(path)) == [("000", "crumb: n.\n\nTwo binary digits; a quad.")]

    def test_factbook(self, tmp_path: Path) -> None:
        path = tmp_path / "aa.json"
        background, note = sentences(1, 12), sentences(2, 3)
        country = {
            "Introduction": {"Background": {"text": background}},
            "Geography": {"Climate": {"north": {"text": note}}, "Area": {"total": {"text": "643,801 sq km"}}},
            "Government": {"Country name": {"conventional short form": {"text": "Freedonia"}}},
        }
        path.write_text(json.dumps(country))
        assert list(readers.factbook(path)) == [("", f"Freedonia\n\n{background}\n\nClimate, north: {note}")]

    def test_python(self, tmp_path: Path) -> None:
        body = '"""A module."""\n\nimport os\n\n\n' + "".join(
            f"def call_{i}(path):\n    # joins\n    return os.path.join(path, 'x')\n\n\n"
            for i in "abcdefghij"
        )
        notice = "# Copyright 2020 Somebody\n# Licensed under the MIT licence\n\n"
        path = tmp_path / "good.py"
        path.write_text(notice + body)
        assert list(readers.python(path)) == [("", body.rstrip() + "\n")]
        for name, text in {
            "broken.py": body + "def (\n",
            "made.py": "# Generated by a tool, do not edit\n" + body,
            "wide.py": body + f"x = '{'a' * 200}'\n",
            "digits.py": body
            + "x = ["
            + "123456789, " * 12
            + "\n"
            + ("1234567890, " * 12 + "\n") * 20
            + "]\n",
            "tiny.py": "x = 1\n",
        }.items():
            other = tmp_path / name
            other.write_text(text)
            assert list(readers.python(other)) == [], name

    def test_aside(self) -> None:
        aside = ["a/tests/b.py", "a/test_b.py", "tests/b.py", "p/_vendor/b.py", "a/b_pb2.py", "a/_version.py"]
        assert all(map(readers.is_aside, aside))
        assert not any(
            map(readers.is_aside, ["a/latest/b.py", "a/contest.py", "a/database.py", "a/vendors.py"])
        )


class TestOverlap:
    def test_hashes_are_of_windows(self) -> None:
        text = sentences(3, 4)
        found = window_hashes(text)
        assert len(found) == len(text) - WINDOW + 1
        again = window_hashes(text[7 : 7 + WINDOW + 1])
        assert list(again) == list(found[7:9])
        assert list(window_hashes(text.replace(" ", "\n  "))) == list(found)
        assert len(window_hashes("x" * (WINDOW - 1))) == 0

    def test_shared(self) -> None:
        quoted = sentences(5, 1)[:80].ljust(80, "q")
        windows = Windows([sentences(4, 20), quoted])
        assert len(windows.shared("zzzz " + quoted + " zzzz")) == len(quoted) - WINDOW + 1
        assert (
            len(windows.shared("Nothing of this is anywhere in what the others say, is it? Surely not.")) == 0
        )
        assert len(Windows([]).shared(quoted)) == 0


def text(name: str, body: str, domain: corpus.Domain = "prose") -> Text:
    return Text(f"p/{name}", domain, body)


class TestSelection:
    def test_boilerplate_goes(self) -> None:
        texts = [text(str(i), f"Home\n\n{sentences(i, 5)}\n\nSee also") for i in range(20)]
        cleaned = without_boilerplate(texts)
        assert [t.body for t in cleaned] == [sentences(i, 5) for i in range(20)]

    def test_repeats(self) -> None:
        repeats = Repeats()
        once, other = sentences(1, 12), sentences(2, 12)
        assert repeats.cleaned(text("a", once)) == text("a", once)
        assert repeats.cleaned(text("b", f"{once}\n\n{other}")) == text("b", other)
        assert repeats.cleaned(text("c", once)) is None
        code = text("d", "x = 1\n" * 90, "code")
        assert repeats.cleaned(code) == code
        assert repeats.cleaned(text("e", "x = 1\n\n" * 90, "code")) is None

    def test_limit_and_bench_texts(self) -> None:
        source = Source("p", "MIT", limit=3_000)
        novel = bench_texts()[0]
        texts = [text(str(i), sentences(i, 20)) for i in range(9)] + [text("n", novel[5_000:6_000])]
        ((_, kept),) = select([Read(source, "1", "", texts)], Windows(bench_texts()))
        assert 0 < sum(len(t.body) for t in kept) <= 3_000
        assert "p/n" not in {t.name for t in kept}
        ((_, kept),) = select([Read(source, "1", "", texts[-1:])], Windows([]))
        assert [t.name for t in kept] == ["p/n"]

    def test_heldout_is_unlike_training(self) -> None:
        training = [text("t", sentences(1, 20))]
        other = text("h", sentences(2, 20))
        copy = text("c", sentences(3, 10) + " " + sentences(1, 20)[:300])
        assert unlike([other, copy], training) == [other]

    def test_code_is_held_out_by_package(self) -> None:
        source = Source("p", "MIT", "pip", "python", heldout=True)
        assert corpus.is_heldout(source, text("a", "x", "code"))
        prose = [corpus.is_heldout(Source("p", "MIT"), text(str(i), "x")) for i in range(5_000)]
        assert 60 < sum(prose) < 150


class TestBuild:
    def make(self, tmp_path: Path) -> dict:
        """A corpus of two packages that lie unpacked already."""
        page, module = (
            Source("pages", "MIT", paths=("*.html",)),
            Source("mod", "MIT", "pip", "python", "1", ("*.py",)),
        )
        held = Source("other", "MIT", "pip", "python", "1", ("*.py",), heldout=True)
        for source, ending in ((page, "html"), (module, "py"), (held, "py")):
            files = tmp_path / "cache" / f"{source.client}-{source.package}" / "files"
            files.mkdir(parents=True)
            (files.parent / "archive").mkdir()
            (files.parent / "archive" / f"{source.package}_1_all.deb").write_bytes(b"")
            for index in range(300 if ending == "html" else 3):
                words = sentences(hash_of(source.package, index), 12)
                letter = chr(97 + index % 26)
                code = (f"def {source.package}_{letter}{k}(a):\n    return a + {k}\n\n\n" for k in range(12))
                body = f"<p>{words}</p>" if ending == "html" else "".join(code)
                (files / f"{index}.{ending}").write_text(body)
        return corpus.build(tmp_path / "out", tmp_path / "cache", (page, module, held))

    def test_files(self, tmp_path: Path) -> None:
        manifest = self.make(tmp_path)
        out = tmp_path / "out"
        prose = corpus.read_documents(out / "train-prose.txt.xz")
        held = corpus.read_documents(out / "heldout-prose.txt")
        assert len(prose) + len(held) == 300
        assert len(held) >= 1
        assert not set(prose) & set(held)
        assert len(corpus.read_documents(out / "train-code.txt.xz")) == 3
        assert (out / "heldout-code.names").read_text().count("other/") == 3
        assert manifest == json.loads((out / "manifest.json").read_text())
        facts = manifest["files"]["train-prose.txt.xz"]
        assert facts["documents"] == len(prose)
        assert facts["text_bytes"] == sum(len(d.encode()) for d in prose)
        assert lzma.decompress((out / "train-prose.txt.xz").read_bytes()).decode() == "\0".join(prose)
        for name, facts in manifest["files"].items():
            assert hashlib.sha256((out / name).read_bytes()).hexdigest() == facts["sha256"]

    def test_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(corpus, "MAX_COMPRESSED", 1_000)
        with pytest.raises(NInferError, match=r"the limit is 1,000: lower the limits"):
            self.make(tmp_path)

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        home = tmp_path / "pip-empty"
        (home / "files").mkdir(parents=True)
        (home / "archive").mkdir()
        (home / "archive" / "empty-1.whl").write_bytes(b"")
        with pytest.raises(NInferError, match="empty 1 holds no document that python can read"):
            corpus.read_source(Source("empty", "MIT", "pip", "python", "1", ("*.py",)), tmp_path)


def hash_of(name: str, index: int) -> int:
    return int.from_bytes(f"{name}/{index}".encode()) % 1_000_003


def test_credits(tmp_path: Path) -> None:
    folder = tmp_path / "usr" / "share" / "doc" / "pages"
    folder.mkdir(parents=True)
    (folder / "copyright").write_text(
        "Files: *\nCopyright: 2001-2020 Some Body <a@b.org>\nLicense: MIT\n\nCopyright (c) 2001 Other Org.\n"
    )
    assert credits.credit_of(Source("pages", "MIT"), tmp_path) == "© 2001-2020 Some Body; © 2001 Other Org"


def test_sources_are_permissive_and_credited() -> None:
    assert {source.spdx for source in SOURCES} <= ALLOWED
    assert len({(source.client, source.package) for source in SOURCES}) == len(SOURCES)
    assert all(source.version for source in SOURCES if source.client != "apt")
    page = (ROOT / "tools" / "nano" / "SOURCES.md").read_text("utf-8")
    for source in SOURCES:
        assert f"| {source.package} " in page, source.package


def test_heldout_corpus_is_readable() -> None:
    read = read_manifest(ROOT / "bench" / "heldout" / "manifest.json")
    sizes = {"prose": 0, "code": 0, "tasks": 0}
    for stream in read.streams:
        if stream.domain in sizes:
            sizes[stream.domain] += len(stream.text.encode())
    assert all(60_000 <= size <= 110_000 for size in sizes.values()), sizes
    quick = read_manifest(ROOT / "bench" / "heldout" / "manifest.json", quick=True)
    assert {stream.domain for stream in quick.streams} >= set(sizes)
    bench = Windows(bench_texts())
    assert [len(bench.shared(s.text)) for s in read.streams if s.domain == "prose"] == [0, 0]


def test_heldout_tasks_are_those_of_the_generators() -> None:
    """A generator that draws other instances needs a new corpus_id, and new texts."""
    streams = heldout.task_streams()
    for stream, items in streams.items():
        kept = (ROOT / "bench" / "heldout" / f"{stream}.txt").read_text("utf-8")
        assert kept == heldout.joined(items), f"{stream}.txt: raise CORPUS_ID and run tools.nano.heldout"
        assert {name for name, _ in items} == set(generators()) - set(heldout.TASKS_LEFT_OUT)
    first, second = ({text for _, text in items} for items in streams.values())
    assert not first & second
