"""What a caller may choose: when loading an engine, and for each answer."""

from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ninfer.devices import check_device
from ninfer.errors import OptionError
from ninfer.events import MOST_LOGPROBS
from ninfer.formats import KvFormat

if TYPE_CHECKING:
    from ninfer.frontend import SamplingPreset
    from ninfer.runtime import SamplingParams


_U32 = 2**32 - 1
_MAX_THREADS = 1024
_MAX_SLOTS = 4096
MOST_DRAFTS = 5
"""Tokens that an MTP layer may draft a round."""


@dataclass(frozen=True)
class EngineOptions:
    """Fixed while the engine lives.

    `device`: "cpu", "cuda", "cuda:1", ... or "auto", the first GPU that can be used, else the CPU.
    `cuda_graph` off runs decode rounds step by step instead of replaying them: for finding faults; the tokens
    are the same.

    `max_context` tokens of one sequence (None: `default_context`, or the model's positions if those are
    fewer);
    `prefill_chunk` prompt tokens per unit of work, a multiple of 128; `max_concurrency` requests at a time;
    `kv_capacity` tokens of KV cache that they and the prefix cache share (None: `max_context`; "auto": what
    memory allows, less `headroom_mib`); `kv_dtype` its format; `state_slots` snapshots of recurrent states
    that the prefix cache may keep (None: concurrency + 4).

    `prefix_reuse` lets requests begin with what earlier ones computed; `turn_anchors` message boundaries
    before the last message are kept exactly, so that an edited message costs little. `max_pending` further
    requests may wait, each `pending_timeout` seconds at most (None: for ever).

    `chat_template` Jinja source used instead of the artifact's; `threads` of PyTorch and the CPU backend in
    the whole process (None: from the machine); `cache_dir` for converted checkpoints (None: `$NINFER_CACHE`
    or the platform's user cache). `warm_up` runs every kind of decode round before the first request, which
    then doesn't pay for that.

    `spec` "mtp" drafts `draft_tokens` (1 to 5) tokens a round with the model's own MTP layer and checks them
    all at once: the same tokens in fewer rounds. The artifact must have been made with that layer.
    `lm_head_draft` scores drafts with the artifact's smaller proposal head.
    """

    max_context: int | None = None
    default_context: int = 2048
    prefill_chunk: int = 1024
    max_concurrency: int = 1
    kv_capacity: int | Literal["auto"] | None = None
    headroom_mib: int | None = None
    kv_dtype: str = "bf16"
    state_slots: int | None = None
    prefix_reuse: bool = True
    turn_anchors: int = 1
    max_pending: int = 16
    pending_timeout: float | None = 30.0
    chat_template: str | None = None
    threads: int | None = None
    cache_dir: Path | None = None
    warm_up: bool = False
    device: str = "auto"
    cuda_graph: bool = True
    spec: str | None = None
    draft_tokens: int = 0
    lm_head_draft: bool = False

    def __post_init__(self) -> None:
        _check(self, "max_context", Integral, 1, _U32)
        _check(self, "default_context", Integral, 1, _U32)
        _check(self, "prefill_chunk", Integral, 1, _U32)
        _check(self, "max_concurrency", Integral, 1, 8)
        if self.kv_capacity != "auto":
            _check(self, "kv_capacity", Integral, 1, _U32, 'a whole number (or "auto")')
            if self.headroom_mib is not None:
                raise OptionError('headroom_mib needs kv_capacity "auto"')
        _check(self, "headroom_mib", Integral, 0, _U32)
        if self.kv_dtype not in [str(name) for name in KvFormat]:
            raise OptionError(f"kv_dtype must be one of {', '.join(KvFormat)}, not {self.kv_dtype!r:.80}")
        _check(self, "state_slots", Integral, 0, _MAX_SLOTS)
        _check(self, "turn_anchors", Integral, 0, _MAX_SLOTS)
        _check(self, "max_pending", Integral, 0, _U32)
        _check_seconds(self, "pending_timeout", "to wait for ever")
        _check_flags(self, "prefix_reuse", "warm_up", "cuda_graph", "lm_head_draft")
        object.__setattr__(self, "device", check_device(self.device))
        if self.state_slots and not self.prefix_reuse:
            raise OptionError("state_slots needs prefix_reuse; switch it on or leave the slots out")
        _check(self, "threads", Integral, 1, _MAX_THREADS)
        if self.spec not in (None, "mtp"):
            raise OptionError(f'spec must be "mtp" or None, not {self.spec!r:.80}')
        if self.spec is None and self.draft_tokens != 0:
            raise OptionError('draft_tokens needs spec "mtp"')
        if self.spec is None and self.lm_head_draft:
            raise OptionError('lm_head_draft needs spec "mtp"')
        if self.spec is not None:
            _check(self, "draft_tokens", Integral, 1, MOST_DRAFTS)


@dataclass(frozen=True)
class ScorerOptions:
    """Fixed while a scorer lives.

    `context` tokens of a window at most; `kv_dtype` is how keys and values are kept (a `KvFormat`);
    `threads`, `cache_dir` and `device` as for an engine.
    """

    context: int = 4096
    kv_dtype: str = "fp8"
    threads: int | None = None
    cache_dir: Path | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", check_device(self.device))
        _check(self, "context", Integral, 2, _U32)
        _check(self, "threads", Integral, 1, _MAX_THREADS)
        if self.kv_dtype not in tuple(KvFormat):
            raise OptionError(f"invalid KV format: {self.kv_dtype!r:.80}; use one of {', '.join(KvFormat)}")


@dataclass(frozen=True)
class GenerationOptions:
    """Chosen for each answer. Sampling fields left at None take the model's preset for the prompt's mode.

    `max_new` output tokens at most (None: to the end of the context); `thinking_budget` tokens inside the
    thinking block before it is closed; `raw` publishes special tokens and doesn't split channels;
    `ignore_model_stops` goes on behind the model's own stop tokens; `prefix_reuse` off neither uses nor feeds
    the prefix cache.

    `grammar` (Lark, as llguidance reads it; see `frontend.grammar`) is what the answer after the thinking
    block must follow, enforced in sampling. `single_call` ends the answer behind its first complete tool
    call. `logprobs`: so many alternatives with each content token (0: only its own; None: none). `timeout`
    seconds in the queue, instead of the engine's.
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
    ignore_model_stops: bool = False
    prefix_reuse: bool = True
    grammar: str | None = None
    single_call: bool = False
    logprobs: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        _check(self, "max_new", Integral, 0, _U32)
        _check(self, "thinking_budget", Integral, 1, _U32)
        _check(self, "temperature", Real, 0, 2)
        _check(self, "top_p", Real, 0, 1)
        _check(self, "min_p", Real, 0, 1)
        _check(self, "top_k", Integral, 0, 20)
        _check(self, "seed", Integral, 0, 2**64 - 1)
        _check(self, "presence_penalty", Real, -2, 2)
        _check(self, "frequency_penalty", Real, -2, 2)
        _check(self, "logprobs", Integral, 0, MOST_LOGPROBS)
        _check_seconds(self, "timeout", "for the engine's own limit")
        _check_flags(self, "raw", "ignore_model_stops", "prefix_reuse", "single_call")
        if self.grammar is not None and not (isinstance(self.grammar, str) and self.grammar):
            raise OptionError(f"grammar must be text that isn't empty, or None, not {self.grammar!r:.80}")
        if self.thinking is not None:
            _check_flags(self, "thinking")
        for name in ("stop", "reasoning_stop"):
            if isinstance(getattr(self, name), str):
                raise OptionError(
                    f"{name} must be a sequence of strings, not one string; put it into a tuple"
                )
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


def _check_flags(options: object, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(options, name), bool):
            raise OptionError(f"{name} must be True or False, not {value!r:.80}")


def _check_seconds(options: object, name: str, none: str) -> None:
    if getattr(options, name) is not None:
        _check(options, name, Real, 0, _U32)
        if getattr(options, name) == 0:
            raise OptionError(f"{name} must be above 0 seconds, or None {none}")


def _check(options: object, name: str, kind: type, low: int, high: int, what: str | None = None) -> None:
    """OptionError unless the field is such a number in [low, high], or None where that is the default."""
    if getattr(options, name) is getattr(type(options), name) is None:
        return
    value: Any = getattr(options, name)
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
        what = what or ("a whole number" if kind is Integral else "a number")
        raise OptionError(f"{name} must be {what} between {low} and {high}, not {value!r:.80}")
    # NumPy's numbers are not quite like Python's (sums wrap, truth values don't count).
    object.__setattr__(options, name, int(value) if kind is Integral else float(value))
