"""What a caller may choose: when loading an engine, and for each answer."""

from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer.errors import OptionError
from ninfer.formats import KvFormat

if TYPE_CHECKING:
    from ninfer.frontend import SamplingPreset
    from ninfer.runtime import SamplingParams


_U32 = 2**32 - 1
_MAX_THREADS = 1024


@dataclass(frozen=True)
class EngineOptions:
    """Fixed while the engine lives.

    `max_context` tokens of one sequence (default 2048, or the model's positions if those are fewer);
    `prefill_chunk` prompt tokens per unit of work, a multiple of 128; `chat_template` Jinja source used
    instead of the artifact's; `threads` of PyTorch and the CPU backend in the whole process (None: from the
    machine); `cache_dir` for converted checkpoints (None: `$NINFER_CACHE` or the platform's user cache).
    """

    max_context: int | None = None
    prefill_chunk: int = 1024
    chat_template: str | None = None
    threads: int | None = None
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        _check(self, "max_context", Integral, 1, _U32)
        _check(self, "prefill_chunk", Integral, 1, _U32)
        _check(self, "threads", Integral, 1, _MAX_THREADS)


@dataclass(frozen=True)
class ScorerOptions:
    """Fixed while a scorer lives.

    `context` tokens of a window at most; `kv_dtype` is how keys and values are kept (a `KvFormat`);
    `threads` and `cache_dir` as for an engine.
    """

    context: int = 4096
    kv_dtype: str = "fp8"
    threads: int | None = None
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        _check(self, "context", Integral, 2, _U32)
        _check(self, "threads", Integral, 1, _MAX_THREADS)
        if self.kv_dtype not in tuple(KvFormat):
            raise OptionError(f"invalid KV format: {self.kv_dtype!r:.80}; use one of {', '.join(KvFormat)}")


@dataclass(frozen=True)
class GenerationOptions:
    """Chosen for each answer. Sampling fields left at None take the model's preset for the prompt's mode.

    `max_new` output tokens at most (None: to the end of the context); `thinking_budget` tokens inside the
    thinking block before it is closed; `raw` publishes special tokens and doesn't split channels.
    """

    max_new: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int = 0
    thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    stop: tuple[str, ...] = ()
    reasoning_stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    raw: bool = False

    def __post_init__(self) -> None:
        _check(self, "max_new", Integral, 1, _U32)
        _check(self, "thinking_budget", Integral, 1, _U32)
        _check(self, "temperature", Real, 0, 2)
        _check(self, "top_p", Real, 0, 1)
        _check(self, "min_p", Real, 0, 1)
        _check(self, "top_k", Integral, 0, 20)
        _check(self, "seed", Integral, 0, 2**64 - 1)
        _check(self, "presence_penalty", Real, -2, 2)
        _check(self, "frequency_penalty", Real, -2, 2)
        if self.thinking_budget is not None and (self.thinking is False or self.reasoning_effort == "none"):
            raise OptionError("a thinking budget needs thinking; drop the budget or switch thinking on")
        if self.thinking is False and self.reasoning_effort not in (None, "none"):
            raise OptionError(f"reasoning effort {self.reasoning_effort!r} needs thinking; switch it on")

    def sampling(self, preset: "SamplingPreset") -> "SamplingParams":
        """The preset with this request's own values in place."""
        from ninfer.runtime import SamplingParams

        names = [field.name for field in fields(preset)]
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        merged = replace(preset, **chosen)
        return SamplingParams(**{name: getattr(merged, name) for name in names}, seed=self.seed)


def _check(options: object, name: str, kind: type, low: int, high: int) -> None:
    """OptionError unless the field is such a number in [low, high], or None where that is the default."""
    if getattr(options, name) is getattr(type(options), name) is None:
        return
    value: Any = getattr(options, name)
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
        what = "a whole number" if kind is Integral else "a number"
        raise OptionError(f"{name} must be {what} between {low} and {high}, not {value!r:.80}")
