"""Where a conversion writes to: checked before hours of work, not after them."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from ninfer.errors import ConversionError

_JSON_ALLOWANCE = 64 << 20


def temporary_of(path: Path) -> Path:
    """A name beside `path` under which it is made, before it is renamed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def check_absent(path: Path, option: str = "--out") -> None:
    """ConversionError unless nothing is called `path` and a file of that name can be made: one is, for a
    moment, under a temporary name."""
    if os.path.lexists(path):
        raise ConversionError(f"{path} exists already; choose another {option} or remove it")
    if not path.parent.is_dir():
        raise ConversionError(f"the folder {path.parent} does not exist; create it first")
    temporary = temporary_of(path)
    try:
        try:
            temporary.touch(exist_ok=False)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConversionError(
            f"{path} cannot be written: {error.strerror or error}; choose another {option}"
        ) from None


def check_space(out: Path, payload: int) -> None:
    """ConversionError if the disk has no room for an artifact of `payload` bytes at `out`."""
    free = shutil.disk_usage(out.parent).free
    if payload + _JSON_ALLOWANCE > free:
        raise ConversionError(
            f"{out} needs {payload / 1e9:.2f} GB, but {out.parent} has only {free / 1e9:.2f} GB free; "
            f"make room or choose another folder"
        )
