"""`ninfer-inspect`: what a `.ninfer` artifact holds. Reads only the entry file's directory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ninfer.artifact import Artifact, TensorObject
from ninfer.artifact.directory import binding_json, object_json, use_json
from ninfer.artifact.framing import VERSION
from ninfer.cli.common import printable, program, run

app = program()


@app.command(help="Show what a .ninfer artifact holds: components, objects, formats, sizes.")
def inspect(
    file: Annotated[Path, typer.Argument(help="The artifact's entry file.", metavar="FILE")],
    objects: Annotated[bool, typer.Option("--objects", help="Also list every object.")] = False,
    bindings: Annotated[bool, typer.Option("--bindings", help="Also show all bindings and uses.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    with Artifact.open(file) as artifact:
        report = summary(artifact)
        if as_json:
            print(json.dumps(report | _records(artifact, objects, bindings), indent=2, ensure_ascii=False))
            return
        for key, value in report.items():
            print(f"{key}: {_text(value)}")
        if objects:
            for line in _object_lines(artifact):
                print(line)
        if bindings:
            shown = _records(artifact, False, True)
            block = {"bindings": shown["binding_records"], "uses": shown["use_records"]}
            print(json.dumps(block, indent=2, ensure_ascii=False))


def summary(artifact: Artifact) -> dict[str, Any]:
    """The summary's fields, in the order in which they are printed; sizes are bytes."""
    tensors = [record for record in artifact.objects.values() if isinstance(record, TensorObject)]
    return {
        "path": str(artifact.path),
        "version": VERSION,
        "artifact_id": artifact.artifact_id.hex(),
        "name": artifact.metadata.get("name"),
        "components": list(artifact.components),
        "proposal": _proposal(artifact),
        "file_bytes": artifact.file_bytes,
        "payload_bytes": artifact.payload_bytes,
        "files": len(artifact.files),
        "objects": len(artifact.objects),
        "tensors": len(tensors),
        "resources": len(artifact.objects) - len(tensors),
        "bindings": len(artifact.bindings),
        "uses": len(artifact.uses),
        "formats": _histogram(record.format for record in tensors),
        "layouts": _histogram(record.layout for record in tensors),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ninfer-inspect`; the exit code is 0, or 1 after one sentence on stderr."""
    return run(app, "ninfer-inspect", argv)


def _records(artifact: Artifact, objects: bool, bindings: bool) -> dict[str, Any]:
    records: dict[str, Any] = {}
    if objects:
        records["object_records"] = [object_json(record) for record in artifact.objects.values()]
    if bindings:
        records["binding_records"] = {name: binding_json(value) for name, value in artifact.bindings.items()}
        records["use_records"] = [use_json(use) for use in artifact.uses]
    return records


def _object_lines(artifact: Artifact) -> list[str]:
    lines = []
    for record in artifact.objects.values():
        if isinstance(record, TensorObject):
            kind, what = "tensor", f"{record.format}/{record.layout} {list(record.shape)}"
        else:
            kind, what = "resource", record.encoding
        lines.append(f"{record.offset:>14} {record.bytes:>14} {kind:<8} {_text(what)} {_text(record.id)}")
    return lines


def _proposal(artifact: Artifact) -> dict[str, Any] | None:
    """The vocabulary of the head that drafts may be scored with, as the directory has it."""
    text = artifact.components["text"].proposal
    if text is None:
        return None
    return {"domain": text.domain} | ({} if text.rows is None else {"rows": text.rows})


def _histogram(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _text(value: Any) -> str:
    """One line for a person: lists and histograms joined by commas, control characters escaped."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {count}" for name, count in value.items()) or "-"
    elif isinstance(value, list):
        value = ", ".join(value)
    return printable(str(value))


if __name__ == "__main__":
    raise SystemExit(main())
