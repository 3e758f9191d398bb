"""The training texts of ninfer-nano: `python -m tools.nano.corpus --out build/nano/corpus`.

Reads the packages of `sources` and writes, UTF-8 in NFC, documents separated by NUL:

- `train-prose.txt.xz`, `train-code.txt.xz`: in the order of a hash, so that any prefix is a fair sample;
- `heldout-prose.txt`, `heldout-code.txt`: documents that are not trained on, nor anything much like them;
- `manifest.json`: versions, licences, counts, SHA-256 of the files.

Documents that share text with bench/corpus are left out everywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from ninfer.errors import NInferError
from tools.nano.commands import exit_code
from tools.nano.credits import credit_of, sources_page
from tools.nano.fetch import fetch
from tools.nano.overlap import Windows, window_hashes
from tools.nano.readers import READERS, is_aside
from tools.nano.sources import SOURCES, Domain, Source

DOMAINS: tuple[Domain, ...] = ("prose", "code")
HELDOUT_PERCENT = 2  # of the prose documents; of code, whole packages are held out
# Windows in common with bench/corpus that rule a document out; files of code share their import lines.
SHARED = {"prose": 1, "code": 20}
SHARED_PART = 0.02  # of its windows in common with the training texts that unmake a held-out document
MAX_COMPRESSED = 11 << 20  # bytes of the two training files together
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Text:
    """A document: `package/path#part` and what it says."""

    name: str
    domain: Domain
    body: str

    @property
    def order(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()


@dataclass(frozen=True)
class Read:
    """What a source gave: its texts, its version, whom to credit."""

    source: Source
    version: str
    credit: str
    texts: list[Text]


def read_source(source: Source, cache: Path) -> Read:
    """Every document of a source. Raises NInferError if it cannot be fetched or holds no document."""
    root, version = fetch(source, cache)
    texts: list[Text] = []
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).as_posix()
        wanted = any(fnmatch(inside, pattern) for pattern in source.paths)
        if not wanted or any(fnmatch(inside, pattern) for pattern in source.skip):
            continue
        if path.is_symlink() or not path.is_file() or (source.domain == "code" and is_aside(inside)):
            continue
        for part, body in READERS[source.reader](path):
            name = f"{source.package}/{inside}" + (f"#{part}" if part else "")
            body = unicodedata.normalize("NFC", body).replace("\0", "")
            texts.append(Text(name, source.domain, body))
    if not texts:
        raise NInferError(f"{source.package} {version} holds no document that {source.reader} can read")
    return Read(source, version, credit_of(source, root), without_boilerplate(texts))


def without_boilerplate(texts: Sequence[Text]) -> list[Text]:
    """Prose without the lines that many documents of the source repeat (navigation, notices)."""
    if texts[0].domain == "code":
        return list(texts)
    seen = Counter(line for text in texts for line in set(text.body.split("\n")) if line)
    limit = max(8, len(texts) // 40)
    result = []
    for text in texts:
        body = "\n".join(line for line in text.body.split("\n") if not line or seen[line] <= limit)
        while "\n\n\n" in body:
            body = body.replace("\n\n\n", "\n\n")
        result.append(Text(text.name, text.domain, body.strip()))
    return result


class Repeats:
    """Drops what an earlier document said: whole files of code, paragraphs of prose."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def cleaned(self, text: Text) -> Text | None:
        """The text without repeated paragraphs; None if nothing much is left."""
        if text.domain == "code":
            return text if self._new(" ".join(text.body.split())) else None
        kept = [p for p in text.body.split("\n\n") if len(p) < 60 or self._new(p)]
        body = "\n\n".join(kept).strip()
        return Text(text.name, text.domain, body) if len(body) >= 300 else None

    def _new(self, piece: str) -> bool:
        digest = hashlib.blake2b(piece.encode(), digest_size=12).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True


def bench_texts(root: Path = ROOT) -> list[str]:
    """The texts of bench/corpus, which no training text may hold."""
    return [path.read_text("utf-8") for path in sorted((root / "bench" / "corpus").glob("*.txt"))]


def select(reads: Iterable[Read], forbidden: Windows) -> list[tuple[Read, list[Text]]]:
    """Per source the texts to use, up to its limit in the order of their hashes."""
    repeats = Repeats()
    chosen = []
    for read in reads:
        texts: list[Text] = []
        size = 0
        for text in sorted(read.texts, key=lambda text: text.order):
            length = len(text.body.encode())
            if size + length > read.source.limit:
                continue
            if len(forbidden.shared(text.body)) >= SHARED[text.domain]:
                continue
            cleaned = repeats.cleaned(text)
            if cleaned is not None:
                texts.append(cleaned)
                size += len(cleaned.body.encode())
        chosen.append((read, texts))
    return chosen


def is_heldout(source: Source, text: Text) -> bool:
    """Whether the text is kept from training: of code the source says it, of prose the text's hash."""
    if source.domain == "code":
        return source.heldout
    return int(text.order[:8], 16) % 100 < HELDOUT_PERCENT


def unlike(heldout: Sequence[Text], training: Iterable[Text]) -> list[Text]:
    """The held-out texts that share less than `SHARED_PART` of their windows with the training texts."""
    windows = Windows(text.body for text in heldout)
    common = [np.unique(windows.shared(text.body)) for text in training]
    trained = np.unique(np.concatenate(common)) if common else np.zeros(0, dtype=np.uint64)
    return [t for t in heldout if np.isin(window_hashes(t.body), trained).mean() < SHARED_PART]


def build(out: Path, cache: Path, sources: Sequence[Source] = SOURCES) -> dict[str, Any]:
    """Write the corpus and return its manifest. Raises NInferError if it comes out too large to carry."""
    out.mkdir(parents=True, exist_ok=True)
    forbidden = Windows(bench_texts())
    with ProcessPoolExecutor(2) as pool:
        chosen = select(pool.map(read_source, sources, [cache] * len(sources)), forbidden)
    kept = [(read.source, text) for read, texts in chosen for text in texts]
    compressed = 0
    files: dict[str, dict[str, Any]] = {}
    for domain in DOMAINS:
        mine = [(source, text) for source, text in kept if text.domain == domain]
        training = sorted((t for s, t in mine if not is_heldout(s, t)), key=lambda text: text.order)
        heldout = sorted((t for s, t in mine if is_heldout(s, t)), key=lambda text: text.order)
        heldout = unlike(heldout, training)
        packed = lzma.compress(joined(training), preset=9 | lzma.PRESET_EXTREME)
        compressed += len(packed)
        files[f"train-{domain}.txt.xz"] = _write(out / f"train-{domain}.txt.xz", packed, training)
        files[f"heldout-{domain}.txt"] = _write(out / f"heldout-{domain}.txt", joined(heldout), heldout)
        names = "".join(f"{text.name}\n" for text in heldout)
        (out / f"heldout-{domain}.names").write_text(names, "utf-8")
    if compressed > MAX_COMPRESSED:
        raise NInferError(
            f"the training texts take {compressed:,} bytes; the limit is {MAX_COMPRESSED:,}: lower the "
            "limits in tools/nano/sources.py"
        )
    manifest = {"files": files, "sources": [_record(read, texts) for read, texts in chosen]}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    return manifest


def joined(texts: Iterable[Text]) -> bytes:
    """The texts in UTF-8, a NUL between each two."""
    return "\0".join(text.body for text in texts).encode()


def read_documents(path: Path) -> list[str]:
    """The documents of one of the corpus's files."""
    if not path.is_file():
        raise NInferError(f"{path} is missing; make the corpus with python -m tools.nano.corpus")
    data = path.read_bytes()
    try:
        return (lzma.decompress(data) if path.suffix == ".xz" else data).decode().split("\0")
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise NInferError(f"{path} is damaged ({error}); make the corpus again") from None


def _write(path: Path, data: bytes, texts: Sequence[Text]) -> dict[str, Any]:
    path.write_bytes(data)
    size = sum(len(text.body.encode()) for text in texts)
    digest = hashlib.sha256(data).hexdigest()
    return {"documents": len(texts), "text_bytes": size, "bytes": len(data), "sha256": digest}


def _record(read: Read, texts: Sequence[Text]) -> dict[str, Any]:
    source = asdict(read.source)
    size = sum(len(text.body.encode()) for text in texts)
    facts = {key: source[key] for key in ("package", "client", "spdx", "note", "heldout", "limit")}
    facts |= {"domain": read.source.domain, "version": read.version, "credit": read.credit}
    return facts | {"documents": len(texts), "text_bytes": size}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.nano.corpus", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/nano/corpus"))
    parser.add_argument("--cache", type=Path, default=Path("build/nano/cache"), help="downloaded packages")
    options = parser.parse_args(arguments)

    def run() -> None:
        manifest = build(options.out, options.cache)
        page = sources_page(manifest["sources"])
        (Path(__file__).parent / "SOURCES.md").write_text(page, "utf-8")
        for name, facts in manifest["files"].items():
            print(f"{name}: {facts['documents']} documents, {facts['text_bytes']:,} bytes of text")

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
