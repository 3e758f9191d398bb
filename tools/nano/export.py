"""From the training's shards to the shipped artifact, and from that file to everything else.

python -m tools.nano.export hf SHARDS_DIR OUT_FOLDER        shards -> Hugging Face folder
python -m tools.nano.export artifact HF_FOLDER OUT.ninfer   folder -> the artifact that ships, 8-bit
python -m tools.nano.export rebuild ARTIFACT OUT_FOLDER     artifact -> BF16 folder, byte for byte the same
python -m tools.nano.export profiles ARTIFACT OUT_DIR       artifact -> the other weight profiles
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from ninfer.convert import Report, convert
from ninfer.errors import ConversionError
from tools.nano import checkpoint, geometry, gguf_writer, shards
from tools.nano.commands import exit_code
from tools.nano.rebuild import COMPONENTS, rebuild

RECIPE = "groupwise-int8"
PROFILES = {
    "bf16": "bf16",
    "nvfp4-official": "nvfp4-official",
    "quasar": "quasar",
    "groupwise-int": "groupwise-int",
    "q4_k_m": "gguf-preserved",
}  # profile -> recipe
REFERENCE = "reference"  # the rebuilt folder beside the profiles
LIMIT = 25 << 20  # bytes of the shipped artifact


def write_hf(source: Path, out: Path, tokenizer: Path = checkpoint.TOKENIZER) -> None:
    """The training's shards as a Hugging Face folder."""
    checkpoint.write_folder(out, shards.read(source), checkpoint.read_resources(tokenizer))


def write_artifact(folder: Path, out: Path) -> Report:
    """The artifact that ships."""
    report = _convert(folder, out, RECIPE)
    size = out.stat().st_size
    if size > LIMIT:
        raise ConversionError(f"{out} has {size:,} bytes; the shipped artifact may have {LIMIT:,}")
    return report


def write_profiles(artifact: Path, out: Path) -> dict[str, Path]:
    """Profile name -> artifact, all made of the folder rebuilt from `artifact`, kept as `out/reference`."""
    out.mkdir(parents=True, exist_ok=True)
    folder, file = out / REFERENCE, out / f"{geometry.NAME}.Q4_K_M.gguf"
    rebuild(artifact, folder)
    gguf_writer.write(folder, file)
    made = {}
    for profile, recipe in PROFILES.items():
        made[profile] = out / f"{geometry.NAME}-{profile}.ninfer"
        _convert(file if profile == "q4_k_m" else folder, made[profile], recipe)
    return made


def _convert(source: Path, out: Path, recipe: str) -> Report:
    """Convert with the source named by its last part only, so that no machine's paths are kept."""
    source, out = source.resolve(), out.resolve()
    with contextlib.chdir(source.parent):
        return convert(Path(source.name), out, recipe=recipe, components=COMPONENTS, name=geometry.NAME)


def size_table(artifacts: dict[str, Path]) -> str:
    """One line a profile with its size."""
    rows = [f"{'profile':<16} {'bytes':>12} {'MiB':>7}"]
    for profile, path in artifacts.items():
        size = path.stat().st_size
        rows.append(f"{profile:<16} {size:>12,} {size / 2**20:>7.2f}")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    parser = argparse.ArgumentParser(
        "python -m tools.nano.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("hf", "artifact", "rebuild", "profiles"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, default=checkpoint.TOKENIZER, help="folder of the four tokenizer files (hf)"
    )
    given = parser.parse_args(arguments)
    return exit_code(lambda: _run(given.command, given.source, given.out, given.tokenizer))


def _run(command: str, source: Path, out: Path, tokenizer: Path) -> None:
    if command == "hf":
        write_hf(source, out, tokenizer)
    elif command == "artifact":
        write_artifact(source, out)
        print(size_table({RECIPE: out}))
    elif command == "rebuild":
        rebuild(source, out)
    else:
        print(size_table({"shipped": source, **write_profiles(source, out)}))


if __name__ == "__main__":
    sys.exit(main())
