"""One conversion from start to end: sources, configs, recipe, plan, space, encoding, publication, report."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ninfer.artifact import ArtifactWriter, Component, Directory, Proposal, ResourceObject, place
from ninfer.artifact.fileset import MAX_FILE_BYTES
from ninfer.convert import proposal as proposal_head
from ninfer.convert import recipes
from ninfer.convert.catalog import Catalog
from ninfer.convert.checkpoint import Checkpoint, check_same_model, open_checkpoint
from ninfer.convert.encode import Encoder, Progress, default_workers
from ninfer.convert.output import check_absent, check_space, temporary_of
from ninfer.convert.parameters import KNOWN_COMPONENTS, TEXT, Geometry, declare
from ninfer.convert.plan import Plan, Planner
from ninfer.convert.proposal import ProposalOptions
from ninfer.convert.recipe import BASE, Recipe, check
from ninfer.convert.report import Report, describe, encode, report_path
from ninfer.errors import ConversionError

CONVERTER = "ninfer-v3"
ROWS_PER_CHUNK = 512


def convert(
    source: Path,
    out: Path,
    *,
    recipe: str | None = None,
    override: str | None = None,
    sources: Mapping[str, Path] | None = None,
    components: Sequence[str] = (TEXT,),
    resources: Mapping[str, Path] | None = None,
    proposal: ProposalOptions | None = None,
    name: str | None = None,
    device: str = "cpu",
    rows_per_chunk: int = ROWS_PER_CHUNK,
    workers: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress | None = None,
) -> Report:
    """Convert a checkpoint to the artifact `out` and write `<out>.conversion.json` beside it.

    source: a safetensors folder, index or file, or a GGUF file. recipe: a named recipe or
    `FILE.py[:function]`; by default what the source stores is kept. override: a recipe file that runs
    afterwards. sources: further checkpoints by the names that recipes use. resources: role -> file, in
    place of the source's own. proposal: also make a proposal head. workers: encoding threads (default:
    the cores, at most 16). Raises ConversionError (or ArtifactError for the output) in one sentence;
    then, and on Ctrl-C, nothing is left.
    """
    started = time.monotonic()
    source, out = Path(source), Path(out)
    _check_arguments(out, components, rows_per_chunk, name)
    with contextlib.ExitStack() as stack:
        opened = _open_sources(stack, {BASE: source, **(sources or {})})
        base = opened[BASE]
        configs = base.components(components)
        for other, checkpoint in opened.items():
            if other != BASE:
                check_same_model(configs, checkpoint, other)
        chosen = recipe or base.default_recipe
        texts = base.resources(resources or {})
        ids = None
        if proposal is not None:
            ids = proposal_head.select(proposal, texts, Geometry.of(configs[TEXT]).vocab)
        catalog = _catalog(configs, opened, ids)
        choices = _choose(catalog, configs, chosen, override)
        plan = Planner(catalog, choices).plan()
        provenance: dict[str, Any] = {
            "converter": CONVERTER,
            "recipe": chosen,
            "sources": {
                BASE: {"path": str(source)},
                **{key: {"path": str(path)} for key, path in (sources or {}).items()},
            },
        }
        if override is not None:
            provenance["override"] = override
        if proposal is not None and proposal.ranking is not None:
            provenance["ranking"] = str(proposal.ranking)
        record = None if ids is None else Proposal("indexed", len(ids))
        directory = _directory(plan, configs, record, texts, name, provenance)
        check_space(out, directory.payload_end)
        prepared = time.monotonic()
        with ArtifactWriter(out, directory, max_file_bytes=max_file_bytes) as writer:
            written = _counter(directory.payload_end, progress)
            for role, data in texts.items():
                writer.write(_resource_id(role), 0, data)
                written(len(data))
            Encoder(
                catalog,
                writer,
                device=torch.device(device),
                rows_per_chunk=rows_per_chunk,
                workers=workers or default_workers(),
            ).run(plan, written)
            document = describe(
                plan,
                writer.directory,
                out,
                choices.fallbacks,
                device=device,
                torch_version=torch.__version__,
                cuda_version=torch.version.cuda,  # pyright: ignore[reportAttributeAccessIssue]
                rows_per_chunk=rows_per_chunk,
                preparation_seconds=round(prepared - started, 3),
                artifact_id=writer.artifact_id.hex(),
                payload_bytes=directory.payload_end,
                seconds=round(time.monotonic() - started, 3),
            )
            _publish(writer, document)
    seconds = time.monotonic() - started
    return Report(
        out,
        report_path(out),
        writer.artifact_id.hex(),
        directory.payload_end,
        tuple(choices.fallbacks),
        seconds,
        document,
    )


def _check_arguments(out: Path, components: Sequence[str], rows_per_chunk: int, name: str | None) -> None:
    for path in (out, report_path(out)):
        check_absent(path)
    if TEXT not in components or len(set(components)) != len(components):
        raise ConversionError(f"the components {', '.join(components)} must contain text, and none twice")
    for component in components:
        if component not in KNOWN_COMPONENTS:
            raise ConversionError(f"unknown component '{component}'; known are {', '.join(KNOWN_COMPONENTS)}")
    if rows_per_chunk < 1:
        raise ConversionError(f"rows per chunk must be positive, not {rows_per_chunk}")
    if name is not None and not name:
        raise ConversionError("the model name is empty; leave it out instead")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Checkpoint]:
    checkpoint = open_checkpoint(path)
    try:
        yield checkpoint
    finally:
        checkpoint.source.close()


def _open_sources(stack: contextlib.ExitStack, paths: Mapping[str, Path]) -> dict[str, Any]:
    return {name: stack.enter_context(_opened(Path(path))) for name, path in paths.items()}


def _catalog(
    configs: Mapping[str, Mapping[str, Any]], opened: Mapping[str, Any], proposal_ids: np.ndarray | None
) -> Catalog:
    parameters = declare(configs)
    geometry = Geometry.of(configs[TEXT])
    views = {
        name: checkpoint.views(parameters, geometry, is_partial=name != BASE)
        for name, checkpoint in opened.items()
    }
    if proposal_ids is not None:
        declared = proposal_head.declare(len(proposal_ids), geometry.hidden, configs)
        parameters |= {parameter.name: parameter for parameter in declared}
        views[BASE] |= proposal_head.views(proposal_ids, views[BASE]["text/output_head"])
    return Catalog(parameters, {name: checkpoint.source for name, checkpoint in opened.items()}, views)


def _choose(
    catalog: Catalog, configs: Mapping[str, Mapping[str, Any]], recipe: str, override: str | None
) -> Any:
    run = Recipe(configs, catalog)
    if Geometry.of(configs[TEXT]).is_tied:
        run.share("text/output_head", "text/token_embedding")
    recipes.load(recipe)(run)
    if proposal_head.HEAD in catalog.parameters:
        proposal_head.configure(run)
    if override is not None:
        recipes.load(override)(run)
    check(catalog.parameters, run.choices)
    return run.choices


def _directory(
    plan: Plan,
    configs: Mapping[str, Mapping[str, Any]],
    proposal: Proposal | None,
    texts: Mapping[str, bytes],
    name: str | None,
    provenance: Mapping[str, Any],
) -> Directory:
    stored = [
        ResourceObject(_resource_id(role), "raw_bytes_v1", 0, len(data)) for role, data in texts.items()
    ]
    tensors = [weight.tensor for weight in plan.weights] + [tensor for tensor, _ in plan.auxiliaries]
    roles = {role: _resource_id(role) for role in texts}
    components = {
        component: Component(config, None, roles, proposal) if component == TEXT else Component(config, TEXT)
        for component, config in configs.items()
    }
    return Directory(
        components=components,
        objects=place([*stored, *tensors]),
        bindings=plan.bindings,
        uses=plan.uses,
        metadata={} if name is None else {"name": name},
        provenance=provenance,
    )


def _resource_id(role: str) -> str:
    return f"resource/{TEXT}/{role}"


def _counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    done = 0

    def written(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress("converting", min(done, total), total)

    return written


def _publish(writer: ArtifactWriter, document: Mapping[str, Any]) -> None:
    """The artifact, then its report; if the report cannot be put in place, neither stays."""
    target = report_path(writer.path)
    temporary = temporary_of(target)
    committed = False
    try:
        temporary.write_bytes(encode(document))
        writer.commit()
        committed = True
        os.replace(temporary, target)
    except BaseException as error:
        for entry in writer.directory.files if committed else ():
            (writer.path.parent / (entry.path or writer.path.name)).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConversionError(f"{target} cannot be written: {error.strerror or error}") from None
        raise
    finally:
        temporary.unlink(missing_ok=True)
