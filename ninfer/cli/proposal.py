"""`ninfer-proposal`: a small output head for drafting, over the tokens that a corpus uses most."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ninfer.artifact.fileset import MAX_FILE_BYTES
from ninfer.cli.common import MaxFileBytes, Quiet, Workers, end_by_interrupt, printable, program, run, whole
from ninfer.errors import OptionError

if TYPE_CHECKING:
    import numpy as np

    from ninfer.api.token_counts import Counts
    from ninfer.convert.attach import Attachment

app = program()
_SHOWN = 3


@app.command()
def proposal(
    model: Annotated[Path, typer.Argument(help="A .ninfer artifact with an MTP layer.", metavar="MODEL")],
    corpus: Annotated[
        list[Path] | None,
        typer.Argument(
            help="UTF-8 texts, .jsonl files (a conversation or a text on each line), folders of them.",
            metavar="[CORPUS]...",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The artifact to write; it must not exist.")
    ] = None,
    rows: Annotated[
        int | None, whole("--rows", "Tokens of the head (131072, or all of a smaller vocabulary).")
    ] = None,
    ranking: Annotated[
        Path | None, typer.Option("--ranking", help="Token counts of an earlier run, in place of a corpus.")
    ] = None,
    save_counts: Annotated[
        Path | None, typer.Option("--save-counts", help="Also write the token counts, for --ranking.")
    ] = None,
    workers: Workers = None,
    max_file_bytes: MaxFileBytes = MAX_FILE_BYTES,
    quiet: Quiet = False,
) -> int:
    """Count a corpus's tokens and write MODEL with a 4-bit proposal head of the most frequent ones, for
    --lm-head-draft."""
    if out is None and save_counts is None:
        raise OptionError("nothing to do: pass --out for an artifact or --save-counts for the counts")
    if bool(corpus) == (ranking is not None):
        raise OptionError("pass either a corpus (files or folders) or --ranking")
    if ranking is not None and save_counts is not None:
        raise OptionError("--save-counts needs a corpus: --ranking holds the counts already")
    if out and save_counts and os.path.abspath(out) == os.path.abspath(save_counts):
        raise OptionError("--out and --save-counts name the same file")
    if out is None and rows is not None:
        raise OptionError("--rows needs --out")
    if str(model).startswith("synthetic:"):
        raise OptionError(
            f"{model} has no file; synthetic models have a proposal head under PROFILE+mtp+proposal"
        )
    if model.is_dir():
        raise OptionError(f"{model} is a folder; make an artifact of it first (ninfer-convert)")

    end_by_interrupt()
    try:
        lines = _run(model, corpus or [], out, rows, ranking, save_counts, workers, max_file_bytes, quiet)
    except KeyboardInterrupt:
        wanted = " or ".join(str(path) for path in (save_counts, out) if path is not None)
        print(f"\nninfer-proposal: interrupted before {wanted} was complete", file=sys.stderr)
        raise
    for line in () if quiet else lines:
        print(printable(line), file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ninfer-proposal`."""
    return run(app, "ninfer-proposal", argv)


def _run(
    model: Path,
    corpus: Sequence[Path],
    out: Path | None,
    rows: int | None,
    ranking: Path | None,
    save_counts: Path | None,
    workers: int | None,
    max_file_bytes: int,
    quiet: bool,
) -> list[str]:
    """Do what was asked for, everything that can fail early first; returns the summary's lines."""
    from ninfer.api import token_counts
    from ninfer.api.loading import load_frontend
    from ninfer.artifact import Artifact
    from ninfer.cli.progress import conversion_progress
    from ninfer.convert.attach import Attachment
    from ninfer.convert.output import check_absent
    from ninfer.convert.proposal import choose, read_counts, vocabulary

    lines: list[str] = []
    with Artifact.open(model) as artifact, conversion_progress(quiet) as progress:
        attachment = None
        if save_counts is not None:
            check_absent(save_counts, "--save-counts")
        if out is not None:
            attachment = Attachment(artifact, rows, out, max_file_bytes=max_file_bytes)
        vocab = vocabulary(artifact.components["text"].config)
        if ranking is not None:
            totals = read_counts(ranking, vocab)
            origin: dict[str, Any] = {"ranking": _named(ranking)}
        else:
            counts = token_counts.count_tokens(load_frontend(artifact), corpus, vocab, progress)
            totals, lines = counts.totals, _counted(counts)
            origin = {"corpus": [_named(path) for path in corpus]}
        if save_counts is not None:
            token_counts.save_counts(save_counts, totals)
            lines.append(f"{save_counts}: the counts of {vocab} vocabulary rows")
        if attachment is not None:
            ids = choose(totals, attachment.tokens, attachment.rows)
            origin["tokens"] = int(totals.sum())
            size = attachment.write(ids, origin, workers=workers, progress=progress)
            lines += _written(out, size, ids, totals, attachment)
    return lines


def _named(path: Path) -> str:
    """A path as JSON can hold it, whatever bytes it is made of."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def _counted(counts: "Counts") -> list[str]:
    files = "1 file" if counts.files == 1 else f"{counts.files} files"
    lines = [f"{counts.tokens} tokens in {files} ({counts.bytes / 1e6:.1f} MB)"]
    if counts.skipped:
        shown = "; ".join(f"{one.path}: {one.reason}" for one in counts.skipped[:_SHOWN])
        more = ", ..." if len(counts.skipped) > _SHOWN else ""
        left = "1 file was" if len(counts.skipped) == 1 else f"{len(counts.skipped)} files were"
        lines.append(f"note: {left} left out ({shown}{more})")
    return lines


def _written(
    out: Path | None, size: int, ids: "np.ndarray", totals: "np.ndarray", attachment: "Attachment"
) -> list[str]:
    public = totals[: attachment.tokens.public]
    share = 100 * int(totals[ids].sum()) / max(int(public.sum()), 1)
    never = int((totals[ids] == 0).sum())
    lines = [
        f"{out}: {size / 1e6:.1f} MB, with a proposal head of {len(ids)} of {len(public)} tokens, which are "
        f"{share:.2f} % of those counted"
    ]
    if never:
        lines.append(
            f"note: {never} tokens of the head were never counted; lower ids and special tokens fill it"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
