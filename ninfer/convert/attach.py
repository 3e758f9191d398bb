"""A proposal head for an artifact that has none: a new artifact with the same bytes and two more objects.

The head's rows are decoded from the artifact's own output head, a block at a time. In memory stand the new
head as it is stored (4.25 bits a weight: 0.36 GB for 131,072 rows of 5,120) and the blocks that are being
encoded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ninfer import formats
from ninfer.artifact import (
    Artifact,
    ArtifactWriter,
    Binding,
    Directory,
    Proposal,
    TensorObject,
    Use,
    default_layout,
    encoded_bytes,
)
from ninfer.artifact.fileset import MAX_FILE_BYTES
from ninfer.artifact.layouts import decode_rows, pack_rows
from ninfer.artifact.records import ALIGNMENT, align_up
from ninfer.artifact.sizes import RowSplit
from ninfer.convert import proposal
from ninfer.convert.encode import Progress, default_workers, single_threaded_operators
from ninfer.convert.output import check_absent, check_space
from ninfer.convert.parameters import TEXT
from ninfer.errors import ConversionError, FormatError

_HEAD = "text/output_head"
_BLOCK_ROWS = 512
_COPY_BYTES = 8 << 20
_FORGET_BYTES = 256 << 20


@dataclass(frozen=True)
class _Rows:
    """Rows [begin, end) of an object, which are the head's from `first` on."""

    object: TensorObject
    begin: int
    end: int
    first: int


class Attachment:
    """What is to be added to an open artifact; making one checks all that can be checked without the ids."""

    def __init__(
        self, artifact: Artifact, rows: int | None, out: Path, *, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """rows: size of the draft vocabulary, None for the usual one. out: the artifact to write.

        Raises ConversionError: the artifact has a proposal head, nothing that drafts, or no such number of
        tokens; `out` exists or can't be written; too little space.
        """
        text = artifact.components[TEXT]
        if text.proposal is not None or proposal.HEAD in artifact.bindings:
            raise ConversionError(
                f"{artifact.path} has a proposal head already; use the artifact that it was made from"
            )
        check_absent(out)
        self.vocab = proposal.vocabulary(text.config)
        self.hidden = proposal.size(text.config, "hidden_size")
        self.tokens = proposal.Tokens.of({r: artifact.resource(TEXT, r) for r in text.resources})
        if self.tokens.public > self.vocab:
            raise ConversionError(
                f"the tokenizer of {artifact.path} has {self.tokens.public} tokens, but its vocabulary only "
                f"{self.vocab} rows"
            )
        self.rows = self.tokens.rows(rows)
        self._artifact, self._out, self._limit = artifact, out, max_file_bytes
        self._parts = list(self._head_parts())
        head, ids = proposal.declare(self.rows, self.hidden, artifact.components)
        begin = align_up(artifact.directory.payload_end, ALIGNMENT)
        number = _next_number(artifact)
        self._head = _placed(f"weight/{number:06d}", head.shape, proposal.FORMAT, begin)
        begin = align_up(begin + self._head.bytes, ALIGNMENT)
        self._ids = _placed(f"weight/{number + 1:06d}", ids.shape, ids.format, begin)
        self._uses = tuple(Use(proposal.HEAD, name, proposal.POLICY) for name in head.inputs)
        check_space(out, self._ids.offset + self._ids.bytes)

    def write(
        self,
        ids: np.ndarray,
        origin: Mapping[str, Any],
        *,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Write the artifact whose proposal head has the tokens `ids` (int `[rows]`, as `choose` gives them);
        returns the bytes of its files.

        origin: what its provenance says of the choice. Raises ConversionError or ArtifactError; then, and on
        Ctrl-C, nothing is left.
        """
        if ids.shape != (self.rows,) or len(np.unique(ids)) != self.rows:
            raise ConversionError(f"a proposal head of {self.rows} rows needs as many different tokens")
        directory = self._directory(origin)
        with ArtifactWriter(self._out, directory, max_file_bytes=self._limit) as writer:
            done, total = 0, sum(record.bytes for record in directory.objects.values())

            def written(size: int) -> None:
                nonlocal done
                done += size
                if progress is not None:
                    progress("writing the artifact", done, total)

            head = self._encode(ids, workers or default_workers(), progress)
            self._copy(writer, written)
            for begin in range(0, len(head), _COPY_BYTES):
                writer.write(self._head.id, begin, head[begin : begin + _COPY_BYTES])
                written(len(head[begin : begin + _COPY_BYTES]))
            writer.write(self._ids.id, 0, ids.astype("<i4").view(np.uint8))
            written(self._ids.bytes)
            writer.commit()
            return sum(os.stat(path).st_size for path in writer.paths)

    def _directory(self, origin: Mapping[str, Any]) -> Directory:
        old = self._artifact.directory
        text = replace(old.components[TEXT], proposal=Proposal("indexed", self.rows))
        added = {proposal.HEAD: Binding.to(self._head), proposal.TOKEN_IDS: Binding.to(self._ids)}
        facts = {"rows": self.rows, "artifact_id": self._artifact.artifact_id.hex(), **origin}
        return replace(
            old,
            components={**old.components, TEXT: text},
            objects={**old.objects, self._head.id: self._head, self._ids.id: self._ids},
            bindings={**old.bindings, **added},
            uses=(*old.uses, *self._uses),
            provenance={**old.provenance, "proposal": facts},
            files=(),
        )

    def _copy(self, writer: ArtifactWriter, written: Callable[[int], None]) -> None:
        read = 0
        for record in self._artifact.objects.values():
            for begin in range(0, record.bytes, _COPY_BYTES):
                size = min(_COPY_BYTES, record.bytes - begin)
                writer.write(record.id, begin, self._artifact.read_range(record.offset + begin, size))
                written(size)
                read += size
                if read >= _FORGET_BYTES:
                    self._artifact.forget()
                    read = 0

    def _head_parts(self) -> list[_Rows]:
        """The objects that hold the output head's rows (a tied one's: those of the embedding)."""
        found, first = [], 0
        for part in self._artifact.parameter(_HEAD):
            tensor = self._artifact.tensor(part.object)
            whole = len(tensor.shape) == 2 and tensor.shape[1] == self.hidden
            if not whole or part.begin % self.hidden or part.end % self.hidden:
                raise ConversionError(
                    f"the output head of {self._artifact.path} isn't stored in rows of {self.hidden}; no "
                    f"proposal head can be cut from it"
                )
            rows = _Rows(tensor, part.begin // self.hidden, part.end // self.hidden, first)
            found.append(rows)
            first += rows.end - rows.begin
        if first != self.vocab:
            raise ConversionError(
                f"the output head of {self._artifact.path} has {first} rows instead of {self.vocab}"
            )
        return found

    def _encode(self, ids: np.ndarray, workers: int, progress: Progress | None) -> np.ndarray:
        """The new head as it is stored, uint8 `[bytes]`."""
        data = np.zeros(self._head.bytes, dtype=np.uint8)
        split = RowSplit.of(formats.get(proposal.FORMAT), self.hidden, self.rows)
        codes = data[: self.rows * split.base_stride].reshape(self.rows, -1)
        scales = data[split.scale_offset :].reshape(self.rows, -1)
        place = np.full(self.vocab, -1)
        place[ids] = np.arange(self.rows)

        def encode(part: _Rows, source: np.ndarray, begin: int, end: int) -> int:
            target = place[part.first + begin - part.begin : part.first + end - part.begin]
            wanted = np.flatnonzero(target >= 0)
            if len(wanted):
                values = decode_rows(part.object.format, part.object.shape, source, begin, end)[wanted]
                planes = formats.encode(proposal.FORMAT, proposal.METHOD, values)
                runs = pack_rows(proposal.FORMAT, (len(wanted), self.hidden), 0, planes)
                codes[target[wanted]] = runs[0][1].reshape(len(wanted), -1)
                scales[target[wanted]] = runs[1][1].reshape(len(wanted), -1)
            return end - begin

        done = 0
        with single_threaded_operators(), ThreadPoolExecutor(workers, "ninfer-proposal") as pool:
            try:
                for part in self._parts:
                    source = self._artifact.object_bytes(part.object.id)
                    begins = range(part.begin, part.end, _BLOCK_ROWS)
                    pending = {
                        pool.submit(encode, part, source, begin, min(begin + _BLOCK_ROWS, part.end))
                        for begin in begins
                    }
                    while pending:
                        finished, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
                        done += sum(future.result() for future in finished)
                        self._artifact.forget()
                        if progress is not None:
                            progress("encoding the proposal head", done, self.vocab)
            except FormatError as error:
                raise ConversionError(f"no proposal head can be cut from '{_HEAD}': {error}") from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return data


def _next_number(artifact: Artifact) -> int:
    """The first number behind those of all objects that are called weight/NUMBER."""
    numbers = (re.fullmatch(r"weight/(\d+)", identifier) for identifier in artifact.objects)
    return 1 + max((int(match[1]) for match in numbers if match), default=-1)


def _placed(identifier: str, shape: tuple[int, ...], format: str, offset: int) -> TensorObject:
    layout = default_layout(format)
    return TensorObject(identifier, shape, format, layout, offset, encoded_bytes(format, layout, shape))
