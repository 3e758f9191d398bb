"""How fast do 15 GB of weights come to the GPU, and what does it take beside them?

    python -m tools.gpu_check.loading [MODEL] [--folder /dev/shm] [--repeat 2] [--keep]

Writes the synthetic MODEL (default: synthetic:27b/quasar) as an artifact of real layout into the folder, from
where it is loaded as any file is: what was just written is in the page cache. Prints seconds, GB/s, and the
peak of memory beside the weights: on the device, and of the process without the mapped file. The file is
removed in the end unless it is to be kept; one that is there is used. The exit code is 0 if a load took less
than 10 s and less than 1 GB more, 1 if not.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep

SECONDS, EXTRA = 10.0, 10**9
_SPARE = 4 << 30


class HostMemory:
    """The most memory that this process held beside mapped files, over what it held at first, in bytes."""

    def __init__(self) -> None:
        self.begin = self.peak = _held()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        return self.peak - self.begin

    def _watch(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, _held())
            sleep(0.005)


def _held() -> int:
    """Bytes of this process that are not of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def write(model: str, path: Path, device: str) -> int:
    """The synthetic model as an artifact without a tokenizer; its size in bytes."""
    import torch

    from ninfer.api.synthetic import Synthetic
    from ninfer.artifact.writer import ArtifactWriter

    class Writer(ArtifactWriter):
        """Leaves what was written in the page cache."""

        def _flush(self) -> None:
            for file in self._files:
                file.close()

    source = Synthetic(model)
    with Writer(path, source.directory) as writer:
        for name in source.objects:
            writer.write(name, 0, source.object_tensor(name, torch.device(device)).cpu().numpy())
        writer.commit()
    return source.file_bytes


def folder_for(size: int, wanted: Path | None) -> Path:
    """A folder with room for so many bytes, in memory if it may be."""
    places = [wanted] if wanted else [Path("/dev/shm"), Path("/tmp"), Path.cwd()]
    for place in places:
        if place.is_dir() and shutil.disk_usage(place).free > size + _SPARE:
            return place
    sys.exit(f"no room for {size / 1e9:.1f} GB in {', '.join(map(str, places))}")


def load(path: Path) -> tuple[float, int, int, int]:
    """Seconds, bytes on the device, peak beside them there and on the host."""
    import torch

    from ninfer import models
    from ninfer.artifact import Artifact

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with HostMemory() as host:
        begin = perf_counter()
        with Artifact.open(path) as artifact:
            model = models.load(artifact, "cuda")
            torch.cuda.synchronize()
            seconds = perf_counter() - begin
            peak = torch.cuda.max_memory_reserved() - before
    held = torch.cuda.memory_allocated() - before
    del model
    return seconds, held, peak - held, host.extra


def copies_alone(path: Path) -> tuple[float, int]:
    """Seconds and bytes of copying everything to the device without packing it."""
    import torch

    from ninfer.artifact import Artifact, TensorObject
    from ninfer.ops.cuda.upload import Uploader

    device, begin = torch.device("cuda", torch.cuda.current_device()), perf_counter()
    with Artifact.open(path) as artifact, Uploader(device) as upload:
        for name, item in artifact.objects.items():
            if isinstance(item, TensorObject):
                upload(artifact.object_tensor(name, device))
    return perf_counter() - begin, upload.bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="synthetic:27b/quasar")
    parser.add_argument("--folder", type=Path, help="where the file goes (default: memory, if it fits)")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the file there, and use one that is")
    options = parser.parse_args(argv)
    import torch

    from ninfer.api.synthetic import Synthetic

    best, size = None, Synthetic(options.model).file_bytes
    name = f"{options.model.replace(':', '-').replace('/', '-')}.ninfer"
    path = folder_for(0 if options.keep else size, options.folder) / name
    try:
        if not path.is_file():
            begin = perf_counter()
            write(options.model, path, "cuda")
            torch.cuda.empty_cache()
            print(f"{options.model}: {size / 1e9:.2f} GB written to {path.parent} in "
                  f"{perf_counter() - begin:.1f} s", flush=True)  # fmt: skip
        for _ in range(options.repeat):
            seconds, held, device, host = load(path)
            print(
                f"load: {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s, {held / 1e9:.2f} GB of weights; "
                f"beside them at most {device / 1e6:,.0f} MB on the device, {host / 1e6:,.0f} MB on the host",
                flush=True,
            )
            best = min(best or (seconds, device + host), (seconds, device + host))
        seconds, copied = copies_alone(path)
        print(f"copies alone: {seconds:.2f} s, {copied / seconds / 1e9:.2f} GB/s; "
              f"{len(os.sched_getaffinity(0))} processors", flush=True)  # fmt: skip
    finally:
        if not options.keep:
            path.unlink(missing_ok=True)
    right = best is not None and best[0] < SECONDS and best[1] < EXTRA
    print(f"loading: {'as wanted' if right else 'NOT as wanted'} (< {SECONDS:g} s, < {EXTRA / 1e9:g} GB)")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
