"""What a conversion did, as it stands in `<out>.conversion.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ninfer.artifact import Directory
from ninfer.convert.plan import Plan
from ninfer.convert.recipe import Fallback


@dataclass(frozen=True)
class Report:
    """Result of a conversion. `document` is the JSON report as written to `report_path`."""

    path: Path
    report_path: Path
    artifact_id: str
    payload_bytes: int
    fallbacks: tuple[Fallback, ...]
    seconds: float
    document: Mapping[str, Any]


def report_path(out: Path) -> Path:
    """Where the report of the artifact `out` is written."""
    return out.with_name(out.name + ".conversion.json")


def describe(
    plan: Plan, directory: Directory, out: Path, fallbacks: Sequence[Fallback], **facts: Any
) -> dict[str, Any]:
    """The report document; `facts` are the members that only the running conversion knows."""
    formats = Counter(weight.tensor.format for weight in plan.weights)
    formats.update(tensor.format for tensor, _ in plan.auxiliaries)
    return {
        "components": list(directory.components),
        "name": directory.metadata.get("name"),
        "output": str(out),
        **facts,
        "provenance": dict(directory.provenance),
        "counts": {
            "parameters": len(directory.bindings),
            "uses": len(directory.uses),
            "objects": len(directory.objects),
        },
        "formats": dict(sorted(formats.items())),
        "fallbacks": [asdict(fallback) for fallback in fallbacks],
        "methods": [
            {
                "object": weight.tensor.id,
                "parameters": [member.parameter for member in weight.members],
                "sources": list(dict.fromkeys(member.source for member in weight.members)),
                "method": weight.method,
                "method_parameters": {},
                "format": weight.tensor.format,
                "layout": weight.tensor.layout,
                "shape": list(weight.tensor.shape),
            }
            for weight in plan.weights
        ],
        "files": [{"path": entry.path, "payload_bytes": entry.payload_bytes} for entry in directory.files],
    }


def encode(document: Mapping[str, Any]) -> bytes:
    """The document as indented JSON."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
