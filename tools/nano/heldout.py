"""Perplexity texts from the held-out documents: `python -m tools.nano.heldout --corpus build/nano/corpus`.

Writes bench/heldout: a manifest in the form of bench/corpus, four streams, a README that credits them. They
are frozen once a trained model has been measured on them: a change of a byte needs a new `corpus_id`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.nano.corpus import ROOT, read_documents

CORPUS_ID = "ninfer-nano-heldout-v1"
STREAM_BYTES = 45_000
LONG_FORM = ("r-cran-janeaustenr", "dict-devil", "jargon-text")
OWN_LICENCE = ("wordnet-base", "zsh-doc", "xorg-docs")  # would need notices of their own here

Named = tuple[str, str]  # a document's name, its text


def streams(corpus: Path) -> dict[str, list[Named]]:
    """The documents of each stream: whole ones, in the corpus's order, up to about `STREAM_BYTES`."""
    prose, code = (_named(corpus, domain) for domain in ("prose", "code"))
    packages = sorted({_package(name) for name, _ in code})
    groups = {
        "prose-00": [item for item in prose if _package(item[0]) in LONG_FORM],
        "prose-01": [item for item in prose if _package(item[0]) not in LONG_FORM + OWN_LICENCE],
        "code-00": [item for item in code if packages.index(_package(item[0])) % 2 == 0],
        "code-01": [item for item in code if packages.index(_package(item[0])) % 2 == 1],
    }
    return {name: _up_to(items) for name, items in groups.items()}


def write(folder: Path, chosen: Mapping[str, Sequence[Named]], sources: Sequence[Mapping[str, Any]]) -> None:
    """The texts, the manifest and the README."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in chosen.items():
        (folder / f"{name}.txt").write_text("\n\n\n".join(text.strip() for _, text in items) + "\n", "utf-8")
    manifest = {
        "corpus_id": CORPUS_ID,
        "streams": [{"id": n, "domain": n.split("-")[0], "path": f"{n}.txt"} for n in chosen],
        "modes": {"quick": [n for n in chosen if n.endswith("00")], "full": list(chosen)},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    (folder / "README.md").write_text(_readme(chosen, sources), "utf-8")


_HEAD = """# {id}

Held-out texts for `ninfer-perplexity` (docs/perplexity.md) on ninfer-nano: documents that its training text
(tools/nano/SOURCES.md) does not hold; less than 2 % of their 50-byte windows occur in it. Prose was held out
document by document, so its packages are known to the model; the code's packages are not trained on at all.
Made by `python -m tools.nano.heldout`; frozen: a change of a byte needs a new `corpus_id`.

Markup, tables and listings are left out of the prose and its typographic quotes and dashes are ASCII; licence
notices at the top of code files are left out. LICENCES.md has the notices that must go with the texts.

A third domain, `tasks` (answers of the held-out split of bench/tasks), belongs beside these two: add its
streams to the manifest's `streams` and `modes` with that domain.

| texts | from | licence | copyright |
|---|---|---|---|
"""


def _readme(chosen: Mapping[str, Sequence[Named]], sources: Sequence[Mapping[str, Any]]) -> str:
    by_package = {source["package"]: source for source in sources}
    parts = [_HEAD.format(id=CORPUS_ID)]
    for stream, items in chosen.items():
        for package in sorted({_package(name) for name, _ in items}):
            source = by_package[package]
            credit = source["credit"].replace("|", "/")
            parts.append(f"| {stream} | {package} {source['version']} | {source['spdx']} | {credit} |\n")
    return "".join(parts)


def _named(corpus: Path, domain: str) -> list[Named]:
    names = (corpus / f"heldout-{domain}.names").read_text("utf-8").splitlines()
    return list(zip(names, read_documents(corpus / f"heldout-{domain}.txt"), strict=True))


def _package(name: str) -> str:
    return name.split("/")[0]


def _up_to(items: Sequence[Named]) -> list[Named]:
    kept, size = [], 0
    for item in items:
        length = len(item[1].encode())
        if size + length <= STREAM_BYTES:
            kept.append(item)
            size += length
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.nano.heldout", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("build/nano/corpus"))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "heldout")
    options = parser.parse_args(arguments)
    manifest = json.loads((options.corpus / "manifest.json").read_text("utf-8"))
    write(options.out, streams(options.corpus), manifest["sources"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
