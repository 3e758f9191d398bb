"""From the training's shards to the shipped artifact, and from that file to everything else.

python -m tools.nano.export hf SHARDS_DIR OUT_FOLDER        shards -> Hugging Face folder
python -m tools.nano.export artifact HF_FOLDER OUT.ninfer   folder -> the artifact that ships, 8-bit
python -m tools.nano.export mtp ARTIFACT OUT.ninfer --weights FILE
                                                            another MTP layer, all else as it is in ARTIFACT
python -m tools.nano.export rebuild ARTIFACT OUT_FOLDER     artifact -> BF16 folder, byte for byte the same
python -m tools.nano.export profiles ARTIFACT OUT_DIR       artifact -> the other weight profiles
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from ninfer.artifact import Artifact, ArtifactWriter
from ninfer.convert import Report, convert
from ninfer.errors import ConversionError
from tools.nano import checkpoint, geometry, gguf_writer, rebuild, shards
from tools.nano.commands import exit_code
from tools.nano.rebuild import COMPONENTS

RECIPE = "groupwise-int8"
PROFILES = {
    "bf16": "bf16",
    "nvfp4-official": "nvfp4-official",
    "quasar": "quasar",
    "groupwise-int": "groupwise-int",
    "q4_k_m": "gguf-preserved",
}  # profile -> recipe
_MTP = "mtp."  # how the MTP layer's tensors begin
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


def write_mtp(weights: Path, artifact: Path, out: Path) -> None:
    """`artifact` with the MTP layer of `weights`, which tools.nano.recursion left.

    Every other object keeps its bytes, and the directory stays the same."""
    found = checkpoint.load(weights)
    with tempfile.TemporaryDirectory() as scratch, Artifact.open(artifact) as old:
        tensors = rebuild.tensors(old)
        expected = {name for name in tensors if name.startswith(_MTP)}
        if found.keys() != expected:
            odd = min(found.keys() ^ expected)
            raise ConversionError(f"{weights} must hold the MTP layer's tensors alone; see '{odd}'")
        resources = {role: old.resource("text", role) for role in checkpoint.RESOURCES}
        folder = Path(scratch) / geometry.NAME
        checkpoint.write_folder(folder, tensors | found, resources)
        _convert(folder, Path(scratch) / "new.ninfer", RECIPE)
        with Artifact.open(Path(scratch) / "new.ninfer") as new:
            if (new.objects, new.bindings, new.uses) != (old.objects, old.bindings, old.uses):
                raise ConversionError(f"{artifact} was made by another recipe than {RECIPE}")
            owners: dict[str, set[str]] = {}
            for name, binding in old.bindings.items():
                for part in binding.parts:
                    owners.setdefault(part.object, set()).add(name.split("/")[0])
            with ArtifactWriter(out, old.directory) as writer:
                for name, record in old.objects.items():
                    source = new if owners.get(name) == {"mtp"} else old
                    writer.write(name, 0, source.read_range(record.offset, record.bytes))
                writer.commit()


def write_profiles(artifact: Path, out: Path) -> dict[str, Path]:
    """Profile name -> artifact, all made of the folder rebuilt from `artifact`, kept as `out/reference`."""
    out.mkdir(parents=True, exist_ok=True)
    folder, file = out / REFERENCE, out / f"{geometry.NAME}.Q4_K_M.gguf"
    rebuild.rebuild(artifact, folder)
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
    parser.add_argument("command", choices=("hf", "artifact", "mtp", "rebuild", "profiles"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, default=checkpoint.TOKENIZER, help="folder of the four tokenizer files (hf)"
    )
    parser.add_argument("--weights", type=Path, help="what tools.nano.recursion left (mtp)")
    given = parser.parse_args(arguments)
    if (given.command == "mtp") != (given.weights is not None):
        parser.error("mtp, and no other command, needs --weights FILE")
    return exit_code(lambda: _run(given.command, given.source, given.out, given.tokenizer, given.weights))


def _run(command: str, source: Path, out: Path, tokenizer: Path, weights: Path) -> None:
    if command == "hf":
        write_hf(source, out, tokenizer)
    elif command == "mtp":
        write_mtp(weights, source, out)
    elif command == "artifact":
        write_artifact(source, out)
        print(size_table({RECIPE: out}))
    elif command == "rebuild":
        rebuild.rebuild(source, out)
    else:
        print(size_table({"shipped": source, **write_profiles(source, out)}))


if __name__ == "__main__":
    sys.exit(main())
