"""Perplexity texts that were held out: `python -m tools.nano.heldout --corpus build/nano/corpus`.

Writes bench/heldout: a manifest in the form of bench/corpus, six streams, a README that credits them. They
are frozen once a trained model has been measured on them: a change of a byte needs a new `corpus_id`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tasks import generators
from bench.tasks.task import rng_for
from ninfer.errors import NInferError
from tools.nano.commands import exit_code
from tools.nano.corpus import ROOT, read_documents
from tools.nano.samples import text_of

CORPUS_ID = "ninfer-nano-heldout-v2"
STREAM_BYTES = 45_000
TASK_BYTES = 600  # of a generator, after which it adds no further instance
TASKS_LEFT_OUT = ("kv8192",)  # its lists have kv2048's form and would fill half of a stream
LONG_FORM = ("r-cran-janeaustenr", "dict-devil", "jargon-text")
OWN_LICENCE = ("wordnet-base", "zsh-doc", "xorg-docs")  # would need notices of their own here

Named = tuple[str, str]  # a document's name (`package/path`, or a generator's name), its text


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
    return {name: _up_to(items) for name, items in groups.items()} | task_streams()


def task_streams() -> dict[str, list[Named]]:
    """Held-out instances of the task generators as plain text, none twice.

    One stream takes the even instances, one the odd ones.
    """
    found: dict[str, list[Named]] = {}
    seen: set[str] = set()
    for half in (0, 1):
        items: list[Named] = []
        for name, generate in generators().items():
            size, index = 0, half
            while name not in TASKS_LEFT_OUT and size < TASK_BYTES:
                text = text_of(generate(rng_for(name, "heldout", index), "heldout"))
                if text not in seen:
                    items.append((name, text))
                    seen.add(text)
                    size += len(text.encode())
                index += 2
        found[f"tasks-{half:02}"] = sorted(items, key=lambda item: hashlib.sha256(item[1].encode()).digest())
    return found


def write(folder: Path, chosen: Mapping[str, Sequence[Named]], sources: Sequence[Mapping[str, Any]]) -> None:
    """The texts, the manifest and the README."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in chosen.items():
        (folder / f"{name}.txt").write_text(joined(items), "utf-8")
    manifest = {
        "corpus_id": CORPUS_ID,
        "streams": [{"id": n, "domain": n.split("-")[0], "path": f"{n}.txt"} for n in chosen],
        "modes": {"quick": [n for n in chosen if n.endswith("00")], "full": list(chosen)},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    (folder / "README.md").write_text(_readme(chosen, sources), "utf-8")


def joined(items: Sequence[Named]) -> str:
    """A stream's text."""
    return "\n\n\n".join(text.strip() for _, text in items) + "\n"


_HEAD = """# {id}

Held-out texts for `ninfer-perplexity` (docs/perplexity.md) on ninfer-nano, in three domains. Made by
`python -m tools.nano.heldout`; frozen: a change of a byte needs a new `corpus_id`.

- `prose` and `code`: documents that the training text (tools/nano/SOURCES.md) does not hold; less than 2 % of
  their 50-byte windows occur in it. Prose was held out document by document, so its packages are known to the
  model; the code's packages are not trained on at all. Markup, tables and listings are left out of the prose
  and its typographic quotes and dashes are ASCII; licence notices at the top of code files are left out.
- `tasks`: instances of bench/tasks from the held-out split, of every generator but the longest (`kv8192`), in
  a mixed order: declared functions as JSON, the messages' words, the right answer. They are plain text, and
  questions count as much as answers, while ninfer-nano learned answers alone, between control tokens: its
  perplexity here is high and serves to compare formats. How many answers are right says docs/tasks.md.

Version 2 added `tasks`; prose and code are those of version 1. LICENCES.md has the notices that must go with
the texts.

| texts | from | licence | copyright |
|---|---|---|---|
"""


def _readme(chosen: Mapping[str, Sequence[Named]], sources: Sequence[Mapping[str, Any]]) -> str:
    by_package = {source["package"]: source for source in sources}
    parts = [_HEAD.format(id=CORPUS_ID)]
    for stream, items in chosen.items():
        if stream.startswith("tasks"):
            parts.append(f"| {stream} | bench/tasks in this repository | Apache-2.0 | NInfer |\n")
            continue
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
    parser = argparse.ArgumentParser(
        prog="python -m tools.nano.heldout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--corpus", type=Path, default=Path("build/nano/corpus"))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "heldout")
    options = parser.parse_args(arguments)
    manifest = options.corpus / "manifest.json"

    def run() -> None:
        if not manifest.exists():
            raise NInferError(f"{manifest} is missing; make the corpus with python -m tools.nano.corpus")
        write(options.out, streams(options.corpus), json.loads(manifest.read_text("utf-8"))["sources"])

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
