"""Texts to measure perplexity on: a manifest of streams in several domains, or one file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ninfer.artifact.strict_json import loads, show
from ninfer.errors import OptionError


@dataclass(frozen=True)
class TextStream:
    """One text: its id, the domain that it is averaged in, its path as the manifest names it, its content."""

    id: str
    domain: str
    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The streams of one `mode` (quick, full; text for a single file) of the corpus at `source`."""

    id: str
    mode: str
    source: str
    streams: tuple[TextStream, ...]


def read_manifest(path: Path, *, quick: bool = False) -> Corpus:
    """The corpus of a manifest, in one of its modes.

    A manifest is `{corpus_id, streams: [{id, domain, path}], modes: {quick: [ids], full: [ids]}}`; the paths
    are relative to it and stay below its folder. Raises NInferError for one that breaks a rule and for a text
    that is missing, empty, not UTF-8 or contains NUL.
    """
    what = f"the corpus manifest {path}"
    manifest = loads(_read(path, "corpus manifest"), what)
    streams: dict[str, Mapping[str, Any]] = {}
    for stream in _member(manifest, "streams", list, what):
        name = _text(stream, "id", f"a stream of {what}")
        if name in streams:
            raise OptionError(f"{what} has two streams {show(name)}; ids must be unique")
        streams[name] = stream
    mode = "quick" if quick else "full"
    chosen = _member(_member(manifest, "modes", dict, what), mode, list, f"'modes' of {what}")
    if not chosen:
        raise OptionError(f"the mode '{mode}' of {what} names no streams")
    for name in chosen:
        if not isinstance(name, str) or name not in streams:
            raise OptionError(f"the mode '{mode}' of {what} names {show(name)}, which is none of its streams")
        if chosen.count(name) > 1:
            raise OptionError(f"the mode '{mode}' of {what} names {show(name)} twice")
    return Corpus(
        id=_text(manifest, "corpus_id", what),
        mode=mode,
        source=str(path),
        streams=tuple(_stream(name, streams[name], path, what) for name in chosen),
    )


def read_text(path: Path) -> Corpus:
    """One file as a corpus `custom-<filename>` of a single stream in the domain `custom`."""
    stream = TextStream(path.name, "custom", str(path), _decoded(path))
    return Corpus(f"custom-{path.name}", "text", str(path), (stream,))


def _stream(name: str, stream: Mapping[str, Any], manifest: Path, what: str) -> TextStream:
    owner = f"the stream {show(name)} of {what}"
    domain, place = _text(stream, "domain", owner), _text(stream, "path", owner)
    relative = PurePosixPath(place)
    if relative.is_absolute() or ".." in relative.parts or "\\" in place or ":" in place:
        raise OptionError(f"{owner} has the path {show(place)}; it must be relative, with / and without '..'")
    return TextStream(name, domain, place, _decoded(manifest.parent / relative))


def _decoded(path: Path) -> str:
    try:
        text = _read(path, "text").decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"the text {path} is not valid UTF-8 (byte {error.start}); convert it") from None
    if not text:
        raise OptionError(f"the text {path} is empty")
    if "\0" in text:
        raise OptionError(f"the text {path} contains NUL (character {text.index(chr(0))}); is it a text?")
    return text


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"cannot read the {what} {path}: {reason}") from None


def _member(value: Any, name: str, kind: type, owner: str) -> Any:
    """The member `name` of an object; OptionError unless it is there and of the kind."""
    if not isinstance(value, dict) or not isinstance(value.get(name), kind):
        noun = {list: "an array", dict: "an object", str: "a string"}[kind]
        raise OptionError(f"{owner} needs {noun} '{name}'")
    return value[name]


def _text(value: Any, name: str, owner: str) -> str:
    text = _member(value, name, str, owner)
    if not text or not text.isprintable():
        raise OptionError(f"'{name}' of {owner} must be printable text, not {show(text)}")
    return text
