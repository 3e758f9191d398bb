"""A loaded model that says how likely a text is: the engine's sibling for perplexity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ninfer.api.loading import load_model, opened
from ninfer.api.options import ScorerOptions
from ninfer.api.signature import prefill_signature, weight_formats
from ninfer.artifact import Contents
from ninfer.errors import EngineError
from ninfer.formats import KvFormat
from ninfer.frontend import Frontend

if TYPE_CHECKING:
    import numpy as np

    from ninfer.runtime import Scoring


@dataclass(frozen=True)
class ScorerDescription:
    """What was loaded; `window_bytes` is the memory that a window of `context` tokens takes."""

    path: str
    name: str
    architecture: str
    formats: tuple[str, ...]
    prefill_signature: str
    device: str
    threads: int
    context: int
    kv_dtype: str
    window_bytes: int
    load_seconds: float


class Scorer:
    """One model that scores tokens, one window at a time. Use as a context manager, or call `close`.

    Safe to use from several threads: they wait for each other.
    """

    def __init__(
        self, artifact: Contents, frontend: Frontend, scoring: Scoring, description: ScorerDescription
    ) -> None:
        """Use `load`."""
        self._artifact = artifact
        self._frontend = frontend
        self._scoring: Scoring | None = scoring
        self._lock = Lock()
        self.description = description

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: ScorerOptions | None = None,
        *,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Self:
        """Load the text model of a `.ninfer` artifact, a Hugging Face folder or a GGUF file.

        The latter two are converted once into the cache, while `progress(stage, done, total)` is called, as
        it is while weights go to a GPU. Raises `NInferError` subclasses with one sentence for anything wrong
        with file, options or memory.
        """
        begin = perf_counter()
        options = options or ScorerOptions()
        with opened(path, options.cache_dir, progress) as artifact:
            return cls._load(artifact, options, begin, progress)

    @classmethod
    def _load(
        cls,
        artifact: Contents,
        options: ScorerOptions,
        begin: float,
        progress: Callable[[str, int, int], None] | None,
    ) -> Self:
        loaded = load_model(artifact, options.threads, device=options.device, progress=progress)
        from ninfer.runtime import Scoring

        scoring = Scoring(loaded.model, options.context, kv_format=KvFormat(options.kv_dtype))
        description = ScorerDescription(
            path=str(artifact.path),
            name=loaded.name,
            architecture=loaded.frontend.architecture,
            formats=tuple(weight_formats(artifact)),
            prefill_signature=prefill_signature(artifact),
            device=str(loaded.model.device),
            threads=loaded.threads,
            context=options.context,
            kv_dtype=options.kv_dtype,
            window_bytes=scoring.bytes,
            load_seconds=perf_counter() - begin,
        )
        return cls(artifact, loaded.frontend, scoring, description)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, in which spellings of control tokens are text; nothing is added to it."""
        return self._frontend.encode(text)

    def score(
        self, tokens: Sequence[int], first_target: int = 1, *, progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """FP32 natural log p(tokens[i] | tokens before it) for i in [first_target, n): `[n - first_target]`.

        Nothing precedes the first token. `progress` gets the number of tokens fed, chunk by chunk.
        """
        with self._lock:
            if self._scoring is None:
                raise EngineError("the scorer is closed; load the model again")
            return self._scoring.score(tokens, first_target, progress)

    def close(self) -> None:
        """Release the model's memory. May be called more than once."""
        with self._lock:
            self._scoring = None
            self._artifact.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
