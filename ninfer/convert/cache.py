"""Artifacts made from checkpoints that were given straight to a program: converted once, then found again.

One folder per source in the cache, published by a single rename. A lock file keeps two processes from
converting the same source at once; the operating system releases it however its holder ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ninfer.errors import ConversionError
from ninfer.folders import cache_folder

Progress = Callable[[str, int, int], None]

VERSION = 1
"""Raised whenever the converter would make something else of the same source."""

_ARTIFACT = "model.ninfer"
_WEIGHTS = (".safetensors", ".gguf")


def ensure_artifact(path: Path, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The artifact of a model: `path` itself if it is one, else its conversion, made on first use.

    A safetensors folder or a GGUF file is known again by path, size and modification time of its files. The
    component text is converted, every matrix as the source stores it. Raises ConversionError.
    """
    path = Path(path)
    if not path.exists():
        raise ConversionError(
            f"{path} does not exist; give a .ninfer artifact, a Hugging Face folder or a GGUF file"
        )
    if not path.is_dir():
        if not path.is_file():
            raise ConversionError(f"{path} is neither a folder nor a regular file; copy the model to one")
        if not _is_checkpoint_file(path):
            return path
    identity = _identity(path)
    root = cache_folder() if cache_dir is None else Path(cache_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConversionError(
            f"the cache folder {root} cannot be made: {error.strerror or error}; set NINFER_CACHE"
        ) from None
    folder = root / identity
    artifact = folder / _ARTIFACT
    if artifact.is_file():
        return artifact
    with _lock(root / f"{identity}.lock", path, progress):
        if not artifact.is_file():
            _convert(path, folder, progress)
    return artifact


def _is_checkpoint_file(path: Path) -> bool:
    """GGUF by its first bytes; everything else that is a file is left to the artifact reader."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix.lower() in _WEIGHTS


def _identity(path: Path) -> str:
    """A name that changes whenever a file of the checkpoint (or the converter) does."""
    path = path.resolve()
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256(f"{VERSION}\n{path}\n".encode())
    for file in files:
        facts = file.stat()
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return f"{path.stem if path.is_file() else path.name}-{digest.hexdigest()[:16]}"


def _convert(path: Path, folder: Path, progress: Progress | None) -> None:
    from ninfer.convert.pipeline import convert

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left behind by a process that was killed; the lock is ours
    try:
        partial.mkdir()
        convert(
            path,
            partial / _ARTIFACT,
            name=path.stem if path.is_file() else path.resolve().name,
            progress=progress,
        )
        os.rename(partial, folder)
    except OSError as error:
        raise ConversionError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _lock(lock: Path, source: Path, progress: Progress | None) -> Iterator[None]:
    with lock.open("a+b") as file:
        while not _try_lock(file):
            if progress is not None:
                progress(f"waiting for another process that converts {source.name}", 0, 0)
            time.sleep(0.2)
        try:
            yield
        finally:
            _unlock(file)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)
