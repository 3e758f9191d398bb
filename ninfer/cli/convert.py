"""`ninfer-convert`: a checkpoint becomes a `.ninfer` artifact."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ninfer.artifact.fileset import MAX_FILE_BYTES
from ninfer.cli.common import MaxFileBytes, Quiet, Workers, end_by_interrupt, program, run
from ninfer.convert.recipes import NAMED
from ninfer.errors import OptionError

app = program()


@app.command()
def convert(
    model: Annotated[
        Path,
        typer.Option(
            "--model", help="A safetensors folder, index or file, or a GGUF file: the source 'base'."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The artifact to write; it must not exist.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help=f"{', '.join(NAMED)}, or FILE.py[:function] (default: everything as stored, or bf16).",
        ),
    ] = None,
    override: Annotated[
        str | None, typer.Option("--override", help="FILE.py[:function] that changes the recipe's choices.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="NAME=PATH: a further checkpoint (repeatable).")
    ] = None,
    components: Annotated[str, typer.Option("--components", help="Comma list: text, mtp.")] = "text",
    resource: Annotated[
        list[str] | None,
        typer.Option("--resource", help="ROLE=PATH: in place of the source's own (repeatable)."),
    ] = None,
    proposal: Annotated[
        bool,
        typer.Option("--proposal", help="Also make a 4-bit head over the likeliest tokens, for drafting."),
    ] = False,
    proposal_rows: Annotated[
        int | None,
        typer.Option("--proposal-rows", min=1, help="Tokens of that head (131072, or all of fewer)."),
    ] = None,
    ranking: Annotated[
        Path | None,
        typer.Option(
            "--ranking", help="Token counts by ninfer-proposal (default: lower ids are more frequent)."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Public model name.")] = None,
    device: Annotated[str, typer.Option("--device", help="Where encoders run: cpu, cuda, cuda:1.")] = "cpu",
    rows_per_chunk: Annotated[
        int, typer.Option("--rows-per-chunk", min=1, help="Rows encoded at once.")
    ] = 512,
    workers: Workers = None,
    max_file_bytes: MaxFileBytes = MAX_FILE_BYTES,
    quiet: Quiet = False,
) -> int:
    """Convert a checkpoint to an artifact; a report is written to OUT.conversion.json."""
    sources = _pairs(source, "--source", "NAME=PATH")
    resources = _pairs(resource, "--resource", "ROLE=PATH")
    from ninfer.cli.progress import conversion_progress
    from ninfer.convert import convert as convert_checkpoint
    from ninfer.convert.proposal import ROWS, ProposalOptions

    _check_device(device)
    if not proposal and (proposal_rows is not None or ranking is not None):
        raise OptionError("--proposal-rows and --ranking need --proposal")
    head = ProposalOptions(proposal_rows or ROWS, ranking) if proposal else None
    end_by_interrupt()
    try:
        with conversion_progress(quiet) as progress:
            report = convert_checkpoint(
                model,
                out,
                recipe=recipe,
                override=override,
                sources=sources,
                components=tuple(part.strip() for part in components.split(",")),
                resources=resources,
                proposal=head,
                name=name,
                device=device,
                rows_per_chunk=rows_per_chunk,
                workers=workers,
                max_file_bytes=max_file_bytes,
                progress=progress,
            )
    except KeyboardInterrupt:
        print(f"\nninfer-convert: interrupted; nothing was written to {out}", file=sys.stderr)
        raise
    if not quiet:
        for fallback in report.fallbacks:
            print(
                f"note: {fallback.parameter} is {fallback.used} instead of {fallback.wanted} "
                f"({fallback.reason})",
                file=sys.stderr,
            )
        formats = ", ".join(f"{count} {format}" for format, count in report.document["formats"].items())
        print(
            f"{report.path}: {report.payload_bytes / 1e6:.1f} MB in {report.seconds:.1f} s ({formats})",
            file=sys.stderr,
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ninfer-convert`."""
    return run(app, "ninfer-convert", argv)


def _pairs(items: Sequence[str] | None, option: str, form: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise OptionError(f"{option} {item} is not of the form {form}")
        if key in found or (option == "--source" and key == "base"):
            raise OptionError(f"{option} names {key} twice")
        found[key] = Path(value)
    return found


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise OptionError(f"--device {device} is no device; use cpu or cuda") from None
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise OptionError(f"--device {device} is not available on this machine; use cpu")


if __name__ == "__main__":
    sys.exit(main())
