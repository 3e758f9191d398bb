"""Batches of packed documents, drawn by worker processes from seeds.

Step n's batch comes whole from worker n mod the number of workers and depends on nothing but the seed, the
leg, that number and n, so a leg's data can be repeated exactly.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.tasks import generators
from bench.tasks.task import Split
from ninfer.errors import NInferError
from tools.nano.corpus import read_documents
from tools.nano.documents import Document, Encoder
from tools.nano.geometry import CONTEXT
from tools.nano.mix import PIECES, SOURCES, TASKS, TEXT
from tools.nano.packing import room

_PATIENCE = 120  # seconds for a batch
_TRIES = 200  # to draw an instance that is short enough
IGNORED = 255  # the source of tokens that are not learned
_FILES = {"prose": "prose", "code-files": "code"}


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens.

    tokens: uint16 `[T]`. sources: uint8 `[T]`, of the token that follows: its index in SOURCES if it is
    learned, else IGNORED. ends: int32 `[documents + 1]`, cumulative lengths, multiples of CHUNK.
    """

    tokens: np.ndarray
    sources: np.ndarray
    ends: np.ndarray


class Sampler:
    """Draws documents so that each source's tokens keep to its share of `shares`.

    longest: of a document, in tokens; tasks that are longer are left out, texts are cut.
    """

    def __init__(
        self, texts: Mapping[str, Sequence[str]], encoder: Encoder, seed: str, split: Split,
        shares: Mapping[str, float] = TEXT | TASKS, longest: int = CONTEXT,
    ) -> None:  # fmt: skip
        self._random = random.Random(seed)
        self._encoder = encoder
        self._split: Split = split
        self._texts = texts
        self._encoded: dict[tuple[str, int], np.ndarray] = {}
        self._makers = generators()
        self._longest = longest
        self._shares = {name: share / sum(shares.values()) for name, share in shares.items()}
        self._drawn = dict.fromkeys(self._shares, 0.0)
        self._waiting: tuple[int, Document] | None = None

    def batch(self, tokens: int) -> Batch:
        """Pack documents into `tokens`; the one that does not fit opens the next batch."""
        ids = np.zeros(tokens, dtype=np.uint16)
        sources = np.full(tokens, IGNORED, dtype=np.uint8)
        ends = [0]
        while True:
            source, document = self._waiting or self._next()
            self._waiting = None
            begin, length = ends[-1], len(document.ids)
            end = begin + room(length)
            if end > tokens:
                self._waiting = (source, document)
                break
            ids[begin : begin + length] = document.ids
            sources[begin : begin + length - 1][document.learned[1:]] = source
            ends.append(end)
        if ends[-1] < tokens:
            ends.append(tokens)
        return Batch(ids, sources, np.array(ends, dtype=np.int32))

    def rows(self, tokens: int, rows: int) -> Batch:
        """Pack into `rows` equal parts of `tokens` that no document crosses."""
        length = tokens // rows
        parts = [self.batch(length) for _ in range(rows)]
        ends = [[0], *(part.ends[1:] + index * length for index, part in enumerate(parts))]
        return Batch(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.sources for part in parts]),
            np.concatenate(ends).astype(np.int32),
        )

    def _next(self) -> tuple[int, Document]:
        name = min(self._shares, key=lambda known: self._drawn[known] / self._shares[known])
        document = self._piece(name) if name in self._texts else self._task(name)
        self._drawn[name] += room(len(document.ids))
        return SOURCES.index(name), document

    def _task(self, name: str) -> Document:
        for _ in range(_TRIES):
            document = self._encoder.task(self._makers[name](self._random, self._split))
            if len(document.ids) <= self._longest:
                return document
        raise NInferError(f"no instance of {name} has at most {self._longest} tokens; take longer rows")

    def _piece(self, name: str) -> Document:
        """A piece of a text, from its beginning half of the time; all of it is learned."""
        lengths, shares = [length for length, _ in PIECES], [share for _, share in PIECES]
        (length,) = self._random.choices([min(length, self._longest) for length in lengths], shares)
        index = self._random.randrange(len(self._texts[name]))
        if (name, index) not in self._encoded:
            self._encoded[name, index] = self._encoder.text(self._texts[name][index])
        ids = self._encoded[name, index]
        begin = self._random.randrange(max(1, len(ids) - length + 1)) if self._random.random() < 0.5 else 0
        ids = ids[begin : begin + length]
        return Document(ids, np.ones(len(ids), dtype=bool))


def read_texts(corpus: Path, split: Split) -> dict[str, list[str]]:
    """The corpus folder's texts by source name."""
    found = {}
    for name, kind in _FILES.items():
        file = f"train-{kind}.txt.xz" if split == "train" else f"heldout-{kind}.txt"
        found[name] = [text for text in read_documents(corpus / file) if text]
    return found


class Workers:
    """Processes that draw the batches of one leg's steps, in turn; `rows` and `shares` as in `Sampler`."""

    def __init__(
        self, corpus: Path, *, seed: int, leg: int, tokens: int, count: int, rows: int = 1,
        shares: Mapping[str, float] = TEXT | TASKS,
    ) -> None:  # fmt: skip
        context = multiprocessing.get_context("fork")
        self._queues = [context.Queue(maxsize=6) for _ in range(count)]
        self._next = 0
        self._processes = [
            context.Process(
                target=_work,
                args=(out, corpus, f"{seed}/{leg}/{index}", tokens, rows, shares),
                daemon=True,
            )
            for index, out in enumerate(self._queues)
        ]
        for process in self._processes:
            process.start()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                batch = self._queues[self._next % len(self._queues)].get(timeout=_PATIENCE)
            except queue.Empty:
                raise NInferError(
                    f"no batch came for {_PATIENCE} s; the machine may lack memory for {len(self._queues)} "
                    "workers: lower --workers"
                ) from None
            if isinstance(batch, str):
                raise NInferError(f"a worker failed: {batch}")
            self._next += 1
            yield batch

    def waiting(self) -> int:
        """Batches that lie ready; near zero means that the workers are too slow."""
        return sum(out.qsize() for out in self._queues)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()


def _work(
    out: multiprocessing.Queue[Batch | str], corpus: Path, seed: str, tokens: int, rows: int,
    shares: Mapping[str, float],
) -> None:  # fmt: skip
    try:
        texts = read_texts(corpus, "train")
        sampler = Sampler(texts, Encoder(), seed, "train", shares, min(CONTEXT, tokens // rows))
        while True:
            out.put(sampler.rows(tokens, rows))
    except Exception as error:  # the trainer must hear of it
        out.put(f"{type(error).__name__}: {error}")
