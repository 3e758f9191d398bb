"""From the root record's JSON to a `Directory`, every structural rule checked, and back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ninfer.artifact.features import check_features
from ninfer.artifact.framing import MAX_U64
from ninfer.artifact.records import (
    Binding,
    Component,
    Directory,
    FileEntry,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
)
from ninfer.artifact.sizes import MAX_RANK
from ninfer.artifact.strict_json import check_open, check_text, show
from ninfer.errors import ArtifactError

POLICIES = ("A16Only", "AllowA8", "AllowA4")
_ROOT = ("components", "objects", "bindings", "uses", "files")
Record = TensorObject | ResourceObject


def parse(root: Any, entry_name: str) -> Directory:
    """The directory of a decoded root record; `entry_name` is the opened file's name.

    Raises ArtifactError naming the record and the rule.
    """
    _members(root, "the root record", _ROOT, ("metadata", "provenance"))
    files = _files(root["files"], entry_name)
    objects = _objects(root["objects"], sum(entry.payload_bytes for entry in files))
    bindings = {
        _identifier(name, "a parameter name"): _binding(value, f"binding {show(name)}", objects)
        for name, value in _mapping(root["bindings"], "'bindings'").items()
    }
    metadata = _open_object(root.get("metadata", {}), "metadata")
    if "name" in metadata and not (isinstance(metadata["name"], str) and metadata["name"]):
        raise ArtifactError(f"metadata 'name' must be a nonempty string, not {show(metadata['name'])}")
    directory = Directory(
        components=_components(root["components"], objects),
        objects=objects,
        bindings=bindings,
        uses=_uses(root["uses"], bindings, objects),
        metadata=metadata,
        provenance=_open_object(root.get("provenance", {}), "provenance"),
        files=files,
    )
    check_features(directory)
    return directory


def render(directory: Directory) -> dict[str, Any]:
    """The root record as JSON values, members in the reference writer's order."""
    return {
        "components": {name: component_json(value) for name, value in directory.components.items()},
        "objects": [object_json(record) for record in directory.objects.values()],
        "bindings": {name: binding_json(value) for name, value in directory.bindings.items()},
        "uses": [use_json(use) for use in directory.uses],
        "metadata": dict(directory.metadata),
        "provenance": dict(directory.provenance),
        "files": [{"path": entry.path, "payload_bytes": entry.payload_bytes} for entry in directory.files],
    }


def binding_json(binding: Binding) -> dict[str, Any]:
    """`{"object": id}` or `{"parts": [...]}`."""
    if binding.whole:
        return {"object": binding.parts[0].object}
    return {"parts": [{"object": part.object, "range": [part.begin, part.end]} for part in binding]}


def use_json(use: Use) -> dict[str, Any]:
    """A Use, absent members left out."""
    record: dict[str, Any] = {"parameter": use.parameter, "input": use.input}
    if use.activation_policy is not None:
        record["activation_policy"] = use.activation_policy
    if use.auxiliaries:
        record["auxiliaries"] = {role: binding_json(value) for role, value in use.auxiliaries.items()}
    return record


def component_json(component: Component) -> dict[str, Any]:
    """A component, absent members left out."""
    record: dict[str, Any] = {"config": dict(component.config)}
    if component.target is not None:
        record["target"] = component.target
    if component.resources:
        record["resources"] = dict(component.resources)
    if component.proposal is not None:
        rows = component.proposal.rows
        record["proposal"] = {"domain": component.proposal.domain} | ({} if rows is None else {"rows": rows})
    return record


def object_json(record: Record) -> dict[str, Any]:
    """A tensor or resource record."""
    place = {"offset": record.offset, "bytes": record.bytes}
    if isinstance(record, ResourceObject):
        return {"id": record.id, "encoding": record.encoding, **place, "kind": "resource"}
    kind = {"format": record.format, "layout": record.layout}
    return {"id": record.id, "shape": list(record.shape), **kind, **place, "kind": "tensor"}


def _files(value: Any, entry_name: str) -> tuple[FileEntry, ...]:
    entries: list[FileEntry] = []
    taken = {entry_name}
    total = 0
    for index, item in enumerate(_nonempty_list(value, "'files'")):
        owner = f"files[{index}]"
        _members(item, owner, ("path", "payload_bytes"))
        size = _integer(item["payload_bytes"], f"{owner} payload_bytes", 1)
        total += size
        path = item["path"]
        if index == 0:
            if path is not None:
                raise ArtifactError(f"files[0] is the entry itself: its path must be null, not {show(path)}")
        else:
            _sibling(path, owner, taken)
            taken.add(path)
        entries.append(FileEntry(path, size))
    if total > MAX_U64:
        raise ArtifactError("the payload bytes of 'files' add up to more than 2^64 - 1")
    return tuple(entries)


def _sibling(path: Any, owner: str, taken: Collection[str]) -> None:
    _identifier(path, f"{owner} path")
    if "/" in path or "\\" in path or path in (".", ".."):
        raise ArtifactError(f"{owner} path must be the plain name of a sibling file, not {show(path)}")
    if path in taken:
        raise ArtifactError(f"{owner} path {show(path)} is already another file of the artifact")


def _objects(value: Any, payload: int) -> dict[str, Record]:
    objects: dict[str, Record] = {}
    end = 0
    for index, item in enumerate(_nonempty_list(value, "'objects'")):
        record = _object(item, index)
        if record.id in objects:
            raise ArtifactError(f"object id {show(record.id)} appears twice")
        if record.offset < end:
            raise ArtifactError(
                f"object {show(record.id)} at {record.offset} overlaps or precedes the one before it, "
                f"which ends at {end}"
            )
        end = record.offset + record.bytes
        if end > payload:
            raise ArtifactError(
                f"object {show(record.id)} ends at {end}, "
                f"beyond the payload of {payload} bytes that 'files' declares"
            )
        objects[record.id] = record
    return objects


def _object(item: Any, index: int) -> Record:
    owner = f"objects[{index}]"
    kind = _mapping(item, owner).get("kind")
    if kind not in ("tensor", "resource"):
        raise ArtifactError(f"{owner} must have kind 'tensor' or 'resource', not {show(kind)}")
    own = ("shape", "format", "layout") if kind == "tensor" else ("encoding",)
    _members(item, owner, ("id", "kind", *own, "offset", "bytes"))
    identifier = _identifier(item["id"], f"{owner} id")
    owner = f"object {show(identifier)}"
    offset = _integer(item["offset"], f"{owner} offset", 0)
    size = _integer(item["bytes"], f"{owner} bytes", 1)
    if kind == "resource":
        return ResourceObject(identifier, _identifier(item["encoding"], f"{owner} encoding"), offset, size)
    shape = _list(item["shape"], f"{owner} shape")
    if len(shape) > MAX_RANK:
        raise ArtifactError(f"{owner} has {len(shape)} dimensions; at most {MAX_RANK} are allowed")
    dimensions = tuple(_integer(size, f"{owner} dimension", 1) for size in shape)
    if math.prod(dimensions) > MAX_U64:
        raise ArtifactError(f"{owner} has more than 2^64 - 1 elements")
    format = _identifier(item["format"], f"{owner} format")
    layout = _identifier(item["layout"], f"{owner} layout")
    return TensorObject(identifier, dimensions, format, layout, offset, size)


def _components(value: Any, objects: Mapping[str, Record]) -> dict[str, Component]:
    components: dict[str, Component] = {}
    records = _mapping(value, "'components'")
    if "text" not in records:
        raise ArtifactError("'components' lacks the component 'text', which every artifact has")
    for name, item in records.items():
        owner = f"component {show(_identifier(name, 'a component id'))}"
        _members(item, owner, ("config",), ("target", "resources", "proposal"))
        config = _open_object(item["config"], f"{owner} config")
        target = _target(item, name, owner, records)
        resources = _mapping(item.get("resources", {}), f"{owner} resources")
        for role, reference in resources.items():
            _identifier(role, f"{owner} resource role")
            _identifier(reference, f"{owner} resource {show(role)}")
            if not isinstance(objects.get(reference), ResourceObject):
                problem = "a tensor" if reference in objects else "no object of this artifact"
                raise ArtifactError(
                    f"{owner} resource {show(role)} names {show(reference)}, which is {problem}"
                )
        if "proposal" in item and name != "text":
            raise ArtifactError(f"{owner} must not have a 'proposal'; only 'text' has one")
        proposal = _proposal(item["proposal"]) if "proposal" in item else None
        components[name] = Component(config, target, dict(resources), proposal)
    return components


def _target(item: Mapping[str, Any], name: str, owner: str, records: Mapping[str, Any]) -> str | None:
    if "target" in item:
        target = _identifier(item["target"], f"{owner} target")
        if target not in records:
            raise ArtifactError(f"{owner} has the target {show(target)}, which is no component")
        if name != "text" and target != "text":
            raise ArtifactError(f"{owner} must have target 'text', not {show(target)}")
        return target
    if name != "text":
        raise ArtifactError(f"{owner} lacks its target; every component but 'text' has target 'text'")
    return None


def _proposal(value: Any) -> Proposal:
    owner = "component 'text' proposal"
    domain = _mapping(value, owner).get("domain")
    if domain == "full":
        _members(value, owner, ("domain",))
        return Proposal("full")
    if domain == "indexed":
        _members(value, owner, ("domain", "rows"))
        return Proposal("indexed", _integer(value["rows"], f"{owner} rows", 1))
    raise ArtifactError(f"{owner} must have domain 'full' or 'indexed', not {show(domain)}")


def _binding(value: Any, owner: str, objects: Mapping[str, Record]) -> Binding:
    if "object" in _mapping(value, owner):
        _members(value, owner, ("object",))
        return Binding.to(_tensor(value["object"], owner, objects))
    _members(value, owner, ("parts",))
    parts = []
    for item in _nonempty_list(value["parts"], f"{owner} parts"):
        _members(item, f"{owner} part", ("object", "range"))
        tensor = _tensor(item["object"], owner, objects)
        limits = _list(item["range"], f"{owner} range")
        if len(limits) != 2:
            raise ArtifactError(f"{owner} range must be [begin, end], not {len(limits)} numbers")
        begin, end = (_integer(limit, f"{owner} range", 0) for limit in limits)
        if not begin < end <= tensor.elements:
            raise ArtifactError(
                f"{owner} takes the range [{begin}, {end}) of object {show(tensor.id)}, "
                f"which has {tensor.elements} elements"
            )
        parts.append(Part(tensor.id, begin, end))
    return Binding(tuple(parts))


def _tensor(reference: Any, owner: str, objects: Mapping[str, Record]) -> TensorObject:
    found = objects.get(_identifier(reference, f"{owner} object"))
    if found is None:
        raise ArtifactError(f"{owner} names the object {show(reference)}, which does not exist")
    if not isinstance(found, TensorObject):
        raise ArtifactError(f"{owner} names {show(reference)}, which is a resource, not a tensor")
    return found


def _uses(value: Any, bindings: Mapping[str, Binding], objects: Mapping[str, Record]) -> tuple[Use, ...]:
    uses: dict[tuple[str, str], Use] = {}
    for index, item in enumerate(_list(value, "'uses'")):
        owner = f"uses[{index}]"
        _members(item, owner, ("parameter", "input"), ("activation_policy", "auxiliaries"))
        parameter = _identifier(item["parameter"], f"{owner} parameter")
        key = (parameter, _identifier(item["input"], f"{owner} input"))
        if parameter not in bindings:
            raise ArtifactError(f"{owner} is of the parameter {show(parameter)}, which 'bindings' lacks")
        if key in uses:
            raise ArtifactError(f"{owner} repeats the use of {show(parameter)} with input {show(key[1])}")
        policy = item.get("activation_policy")
        if "activation_policy" in item and policy not in POLICIES:
            raise ArtifactError(
                f"{owner} activation_policy must be one of {', '.join(POLICIES)}, not {show(policy)}"
            )
        auxiliaries = {
            _identifier(role, f"{owner} auxiliary role"): _binding(
                bound, f"{owner} auxiliary {show(role)}", objects
            )
            for role, bound in _mapping(item.get("auxiliaries", {}), f"{owner} auxiliaries").items()
        }
        uses[key] = Use(*key, policy, auxiliaries)
    return tuple(uses.values())


def _open_object(value: Any, owner: str) -> dict[str, Any]:
    found = _mapping(value, owner)
    check_open(found, owner)
    return found


def _members(value: Any, owner: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    found = _mapping(value, owner)
    for name in required:
        if name not in found:
            raise ArtifactError(f"{owner} lacks the member '{name}'")
    for name in found:
        if name not in required and name not in optional:
            raise ArtifactError(f"{owner} has the unknown member {show(name)}")


def _mapping(value: Any, owner: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArtifactError(f"{owner} must be an object, not {show(value)}")
    return value


def _list(value: Any, owner: str) -> list[Any]:
    if not isinstance(value, list):
        raise ArtifactError(f"{owner} must be an array, not {show(value)}")
    return value


def _nonempty_list(value: Any, owner: str) -> list[Any]:
    if not _list(value, owner):
        raise ArtifactError(f"{owner} must not be empty")
    return value


def _integer(value: Any, owner: str, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_U64:
        raise ArtifactError(f"{owner} must be an integer in [{least}, 2^64 - 1], not {show(value)}")
    return value


def _identifier(value: Any, owner: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ArtifactError(f"{owner} must be a nonempty string without NUL, not {show(value)}")
    check_text(value, owner)
    return value
