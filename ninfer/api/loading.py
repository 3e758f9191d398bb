"""What an engine and a scorer have in common: a path becomes an open artifact, a frontend and a model."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ninfer.api import synthetic
from ninfer.api.device import choose_device
from ninfer.artifact import Artifact, Contents, TensorObject
from ninfer.convert import ensure_artifact
from ninfer.errors import ModelError
from ninfer.frontend import Frontend

if TYPE_CHECKING:
    from ninfer.models import Model

_TEXT_ROLES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def located(
    path: str | Path, cache_dir: Path | None = None, progress: Callable[[str, int, int], None] | None = None
) -> Path:
    """The artifact of a model, made on first use (`ensure_artifact`); a synthetic model's name as it is."""
    return Path(path) if synthetic.is_synthetic(path) else ensure_artifact(Path(path), cache_dir, progress)


@contextmanager
def opened(
    path: str | Path, cache_dir: Path | None, progress: Callable[[str, int, int], None] | None
) -> Iterator[Contents]:
    """The contents of a model, converted into the cache if need be; stays open unless the block raises."""
    found = located(path, cache_dir, progress)
    artifact = (
        synthetic.Synthetic(found.as_posix()) if synthetic.is_synthetic(found) else Artifact.open(found)
    )
    try:
        yield artifact
    except BaseException:
        artifact.close()
        raise


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model that is ready to compute, on `threads` threads, and its frontend; `name` is the artifact's.

    `weight_bytes`: what the weights take on the device (in their file, on the CPU); it took `upload_seconds`
    to bring them there.
    """

    name: str
    frontend: Frontend
    model: "Model"
    threads: int
    weight_bytes: int
    upload_seconds: float


def load_model(
    artifact: Contents,
    threads: int | None,
    chat_template: str | None = None,
    *,
    device: str = "cpu",
    predictor: bool = False,
    proposal: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Loaded:
    """Build the frontend, import what computes, and bind the weights on a device (a name as in the options);
    with `predictor` those of the MTP layer as well, with `proposal` its smaller head.

    `progress(stage, done, total)` is called while weights are brought to a GPU.
    """
    with ThreadPoolExecutor(1) as pool:
        # The tokenizer is built while PyTorch and the kernels are imported and the device wakes up.
        pending = pool.submit(load_frontend, artifact, chat_template)
        import torch

        from ninfer import models
        from ninfer.ops.dispatch import backend

        chosen, held, team = choose_device(device), 0, 1
        operators = backend(chosen.type)
        if chosen.type == "cpu":
            team = threads or operators.machine_threads()
            torch.set_num_threads(team)
        else:
            held = torch.cuda.memory_allocated(chosen)
            torch.cuda.synchronize(chosen)
        frontend = pending.result()
    begin = perf_counter()
    model = models.load(
        artifact,
        chosen,
        public_tokens=frontend.public_tokens,
        predictor=predictor,
        proposal=proposal,
        progress=progress,
    )
    seconds = perf_counter() - begin
    if chosen.type == "cpu":
        size = sum(item.bytes for item in artifact.objects.values() if isinstance(item, TensorObject))
    else:
        torch.cuda.empty_cache()
        size = torch.cuda.memory_allocated(chosen) - held
        artifact.forget()
    name = str(artifact.metadata.get("name") or Path(artifact.path).stem)
    return Loaded(name, frontend, model, team, size, seconds)


def load_frontend(artifact: Contents, chat_template: str | None = None) -> Frontend:
    """Tokenizer and template of an artifact; `chat_template` is Jinja source used instead of its own."""
    config = artifact.components["text"].config
    architectures, rows = config.get("architectures"), config.get("vocab_size")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(rows, int):
        raise ModelError(
            f"the text config of {artifact.path} needs one of 'architectures' and an integer 'vocab_size'"
        )
    return Frontend.from_resources(
        {role: artifact.resource("text", role) for role in _TEXT_ROLES},
        architecture=str(architectures[0]),
        vocab_rows=rows,
        chat_template=chat_template,
    )
