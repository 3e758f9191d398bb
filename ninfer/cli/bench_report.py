"""What `ninfer-bench` says: the JSON report, and from it the table and CSV."""

from __future__ import annotations

import csv
import io
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ninfer.api.signature import prefill_signature, weight_formats
from ninfer.api.throughput import Repetition, mean_and_deviation
from ninfer.artifact import TensorObject
from ninfer.engine import Speculation

if TYPE_CHECKING:
    from ninfer.api import Engine
    from ninfer.cli.bench_run import Measured, Settings

SCHEMA = 15
_KV_NAMES = {"int8": "int8-group64", "fp8": "fp8-e4m3-row256"}
_RATES = ("prefill_tok_s", "decode_output_tok_s", "decode_engine_tok_s", "decode_wall_tok_s")
_SECONDS = ("prepare_seconds", "prefill_seconds", "decode_seconds", "total_seconds")


def document(engine: Engine, measured: Sequence[Measured], settings: Settings) -> dict[str, Any]:
    """The report, schema 15; members that mean nothing here are null."""
    d = engine.description
    artifact = engine.artifact
    is_cuda, graphs = d.device.startswith("cuda"), d.cuda_graph
    tensors = [one for one in artifact.objects.values() if isinstance(one, TensorObject)]
    decodes = any(one.case.generated for one in measured)
    return _rounded(
        {
            "schema_version": SCHEMA,
            "artifact_type": "ninfer_bench_report",
            "tool": "ninfer_bench",
            "command": sys.argv,
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "environment": _environment(d.device),
            "artifact": {"path": str(artifact.path), "file_size_bytes": artifact.file_bytes},
            "load": {
                "architecture": d.architecture,
                "name": d.name,
                "weight_formats": weight_formats(artifact),
                "prefill_signature": prefill_signature(artifact),
                "load_seconds": d.load_seconds,
                "upload_seconds": d.upload_seconds if is_cuda else None,
                "artifact_bytes_read": None,
                "host_to_device_bytes": d.weight_bytes if is_cuda else None,
                "peak_staging_bytes": None,
                "tensor_count": len(tensors),
                "resource_count": len(artifact.objects) - len(tensors),
            },
            "memory": _memory(engine),
            "config": {
                "max_context": d.max_context,
                "prefill_chunk": engine.plan.prefill_chunk,
                "kv_cache": _KV_NAMES.get(d.kv_dtype, d.kv_dtype),
                "speculative_backend": "mtp" if d.draft_tokens else None,
                "draft_tokens": d.draft_tokens,
                "mtp_draft_tokens": d.draft_tokens,
                "proposal_head": "optimized" if d.lm_head_draft else "full",
                "use_cuda_graph": graphs,
                "decode_path": "cuda_graph" if graphs else "eager",
                "decode_graph_prime": {
                    "primed": is_cuda and decodes,
                    "output_tokens": 3 if is_cuda and decodes else 0,
                },
                "max_concurrency": engine.plan.concurrency,
                "threads": d.threads,
                "repetitions": settings.repetitions,
                "warmup": settings.warmup,
                "corpus_path": None if settings.corpus is None else str(settings.corpus),
                "corpus_tokens": settings.corpus_tokens,
                "assumed_acceptance": settings.assumed,
            },
            "tests": [
                _test(one, engine.plan.workspace_bytes, d.draft_tokens)
                | {"assumed_decode_tok_s": _assumed(one, d.draft_tokens, settings.assumed)}
                for one in measured
            ],
        }
    )


def as_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False)


def table(report: Mapping[str, Any]) -> str:
    """What was loaded in two lines, then a line for each test."""
    load, config, environment = report["load"], report["config"], report["environment"]
    head = (
        f"{load['name']}: {report['artifact']['file_size_bytes'] / 1e9:.2f} GB, "
        f"{', '.join(load['weight_formats'])}\n"
        f"{environment['gpu_name'] or environment['cpu']}, KV {config['kv_cache']}, context "
        f"{config['max_context']}, prefill chunks of {config['prefill_chunk']}, {config['decode_path']}"
    )
    columns = list(_COLUMNS)
    if (share := config["assumed_acceptance"]) is not None:
        title = f"decode t/s ASSUMING {100 * share:g} % accepted"
        columns.append((title, _cell("assumed_decode_tok_s", lambda value: f"{value:.2f}")))
    rows = [[title for title, _ in columns]]
    rows += [[cell(test) for _, cell in columns] for test in report["tests"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([head, *(line.rstrip() for line in lines)])


def as_csv(report: Mapping[str, Any]) -> str:
    """A line for each test, under names of columns."""
    load, config, memory = report["load"], report["config"], report["memory"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    shared = {
        "target": load["name"],
        "max_context": config["max_context"],
        "prefill_chunk": config["prefill_chunk"],
        "mtp_draft_tokens": config["mtp_draft_tokens"],
        "proposal_head": config["proposal_head"],
        "decode_path": config["decode_path"],
        "kv_cache": config["kv_cache"],
        "kv_payload_bytes": memory["kv_payload_bytes"],
        "load_host_to_device_bytes": load["host_to_device_bytes"],
        "weights_capacity_bytes": memory["weights"]["capacity_bytes"],
        "sequence_capacity_bytes": memory["sequence"]["capacity_bytes"],
        "workspace_capacity_bytes": memory["workspace"]["capacity_bytes"],
        "repetitions": config["repetitions"],
    }
    for test in report["tests"]:
        speculative = test["speculative"]
        values = shared | test
        values |= {
            "spec_rounds": speculative["rounds"],
            "spec_fallback_steps": speculative["fallback_steps"],
            "spec_acceptance_rate": speculative["acceptance_rate"],
        }
        writer.writerow(["" if values[name] is None else values[name] for name in _CSV])
    return out.getvalue()


_CSV = (
    "label", "kind", "n_prompt", "n_gen", "target", "max_context", "prefill_chunk", "mtp_draft_tokens",
    "proposal_head", "decode_path", "kv_cache", "kv_payload_bytes", "load_host_to_device_bytes",
    "weights_capacity_bytes", "sequence_capacity_bytes", "workspace_capacity_bytes", "workspace_peak_bytes",
    "spec_rounds", "spec_fallback_steps", "spec_acceptance_rate", "repetitions", "prefill_tok_s_mean",
    "prefill_tok_s_stddev", "decode_output_tok_s_mean", "decode_output_tok_s_stddev",
    "decode_engine_tok_s_mean", "decode_engine_tok_s_stddev", "prepare_seconds_mean", "prefill_seconds_mean",
    "decode_seconds_mean", "total_seconds_mean", "depth", "concurrency", "decode_wall_tok_s_mean",
    "decode_wall_tok_s_stddev", "decode_host_share_mean", "average_batch_mean", "ms_per_round_mean",
)  # fmt: skip


def _test(measured: Measured, planned: int, window: int) -> dict[str, Any]:
    case, runs = measured.case, measured.repetitions
    kept = {"prefill": bool(case.prompt), "decode": bool(case.generated)}

    def both(name: str, value: Callable[[Repetition], float | None]) -> dict[str, float | None]:
        wanted = kept.get(name.split("_")[0], True)
        mean, deviation = mean_and_deviation(value(run) for run in runs) if wanted else (None, None)
        return {f"{name}_mean": mean, f"{name}_stddev": deviation}

    found: dict[str, Any] = {
        "label": case.label,
        "kind": case.kind,
        "n_prompt": case.prompt_tokens,
        "n_gen": case.generated,
        "depth": case.depth,
        "concurrency": case.concurrency,
        "requested_output_tokens": case.output_tokens,
    }
    for name in (*_RATES, *_SECONDS):
        found |= both(name, lambda run, name=name: getattr(run, name))
    found |= both("decode_host_share", lambda run: run.host_share)
    found |= both("average_batch", lambda run: run.average_batch if case.generated else None)
    found |= both("ms_per_round", _round_ms)
    found |= {"workspace_peak_bytes": measured.workspace_peak, "workspace_planned_bytes": planned}
    total = Speculation()
    for run in runs:
        total.add(run.speculation)
    found["speculative"] = _speculative(total, window)
    found["reps"] = [_repetition(run, window) for run in runs]
    return found


def _speculative(found: Speculation, window: int) -> dict[str, Any]:
    return {
        "enabled": window > 0,
        "draft_window": window,
        "rounds": found.rounds,
        "drafted_tokens": found.drafted,
        "accepted_tokens": found.accepted,
        "fallback_steps": found.fallback_steps if window else 0,
        "acceptance_rate": found.accepted / found.drafted if found.drafted else None,
        "acceptance_length": 1 + found.accepted / found.rounds if found.rounds else None,
        "accepted_per_position": found.per_position,
        "accepted_length_histogram": found.histogram(),
    }


def _round_ms(run: Repetition) -> float | None:
    rounds = run.row_rounds / (run.average_batch or 1)
    return 1e3 * run.decode_seconds / rounds if rounds else None


def _assumed(measured: Measured, window: int, share: float | None) -> float | None:
    """Decoded tokens a second if so many of the drafts stood; an assumption, not a measurement."""
    mean, _ = mean_and_deviation(_round_ms(run) for run in measured.repetitions)
    batch, _ = mean_and_deviation(run.average_batch for run in measured.repetitions)
    if share is None or mean is None or batch is None or not measured.case.generated:
        return None
    return 1e3 * batch * (1 + share * window) / mean


def _repetition(run: Repetition, window: int) -> dict[str, Any]:
    return {
        "generated_output_tokens": sum(one.generated_tokens for one in run.statistics),
        "decode_output_tokens": run.decode_output_tokens,
        "decode_engine_tokens": run.decode_engine_tokens,
        "timings": {
            "prepare_seconds": run.prepare_seconds,
            "vision_seconds": None,
            "prefill_seconds": run.prefill_seconds,
            "first_token_seconds": run.first_token_seconds,
            "decode_seconds": run.decode_seconds,
            "total_seconds": run.total_seconds,
        },
        "decode_host_share": run.host_share,
        "average_batch": run.average_batch,
        "speculative": _speculative(run.speculation, window),
    }


def _environment(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "gpu_name": None,
        "cuda_runtime_version": torch.version.cuda,
        "cuda_driver_version": None,
        "device_id": None,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.startswith("cuda"):
        index = torch.device(device).index or 0
        found |= {"gpu_name": torch.cuda.get_device_name(index), "device_id": index}
        found["cuda_driver_version"] = _driver()
    return found


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # the library is missing or finds no driver; the figure is only information
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def _memory(engine: Engine) -> dict[str, Any]:
    d, plan = engine.description, engine.plan

    def arena(size: int, peak: int | None = None) -> dict[str, int | None]:
        return {"capacity_bytes": size, "used_bytes": size, "peak_used_bytes": peak}

    sequence = plan.kv_bytes + plan.slots * plan.slot_bytes + plan.record_bytes
    return {
        "device": d.device,
        "max_context": d.max_context,
        "kv_cache": _KV_NAMES.get(d.kv_dtype, d.kv_dtype),
        "weights": arena(d.weight_bytes, d.weight_bytes),
        "sequence": arena(sequence, sequence),
        "workspace": arena(plan.workspace_bytes),
        "kv_payload_bytes": plan.kv_bytes,
    }


def _rounded(value: Any) -> Any:
    """Numbers with 10 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _spread(name: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(test: Mapping[str, Any]) -> str:
        mean, deviation = test[f"{name}_mean"], test[f"{name}_stddev"]
        return "-" if mean is None else f"{mean:.2f} ± {deviation:.2f}"

    return cell


def _cell(name: str, shown: Callable[[Any], str] = str) -> Callable[[Mapping[str, Any]], str]:
    return lambda test: "-" if test[name] is None else shown(test[name])


def _acceptance(found: Mapping[str, Any]) -> str:
    rate = found["acceptance_rate"]
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _rounds(found: Mapping[str, Any]) -> str:
    return f"{found['rounds']}/{found['fallback_steps']}" if found["enabled"] else "-"


_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("test", _cell("label")),
    ("n_prompt", _cell("n_prompt")),
    ("n_gen", _cell("n_gen")),
    ("prefill t/s", _spread("prefill_tok_s")),
    ("decode out t/s", _spread("decode_output_tok_s")),
    ("decode eng t/s", _spread("decode_engine_tok_s")),
    ("ms/round", _cell("ms_per_round_mean", lambda value: f"{value:.3f}")),
    ("host", _cell("decode_host_share_mean", lambda value: f"{100 * value:.1f} %")),
    ("batch", _cell("average_batch_mean", lambda value: f"{value:.2f}")),
    ("spec acc", lambda test: _acceptance(test["speculative"])),
    ("spec round/fb", lambda test: _rounds(test["speculative"])),
    ("work peak", _cell("workspace_peak_bytes", lambda value: f"{value / 2**20:.1f} MiB")),
)
