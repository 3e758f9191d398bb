"""Options that `ninfer` and `ninfer-serve` have in common, and what becomes of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ninfer.cli.common import flags, number, whole
from ninfer.devices import NAMES
from ninfer.errors import OptionError
from ninfer.formats import KvFormat

if TYPE_CHECKING:
    from ninfer.api.options import EngineOptions

LATER = {
    "--embedding-host": "weights in the host's memory",
    "--devices": "several GPUs",
    "--tp": "several GPUs",
    "--no-tp-mailbox": "several GPUs",
    "--vision": "vision",
    "--vision-device": "vision",
    "--max-vision-tokens": "vision",
}
"""Known options that wait for later work, refused in a sentence, never ignored; option -> what it needs."""
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "critical", "off")

Model = Annotated[
    Path,
    typer.Argument(
        help="A .ninfer artifact, a Hugging Face folder, a GGUF file or synthetic:GEOMETRY/PROFILE.",
        metavar="MODEL",
    ),
]
MaxContext = Annotated[
    int | None, whole("--max-context", "Tokens of context (2048, serving 8192; at most what the model has).")
]
PrefillChunk = Annotated[int, whole("--prefill-chunk", "Prompt tokens per step, a multiple of 128.")]
MaxConcurrency = Annotated[int, whole("--max-concurrency", "Requests at a time, 1..8; memory is planned so.")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="|".join(KvFormat))]
KvCapacity = Annotated[
    str | None,
    typer.Option(
        "--kv-capacity",
        help="Tokens of KV cache, or auto: what memory allows (--max-context).",
        metavar="N|auto",
    ),
]
HeadroomMib = Annotated[
    int | None, whole("--vram-headroom-mib", "Memory that --kv-capacity auto leaves free (1024).")
]
DeviceStateSlots = Annotated[
    int | None,
    whole("--device-state-slots", "Recurrent states that the prefix cache keeps (concurrency + 4)."),
]
TurnAnchors = Annotated[
    int, whole("--turn-anchors", "Message starts before the last one that are kept exactly.")
]
NoPrefixReuse = Annotated[
    bool, typer.Option("--no-prefix-reuse", help="Compute every prompt from its beginning.")
]
Device = Annotated[
    str, typer.Option("--device", help=f"{NAMES}: the first GPU that can be used, else the CPU.")
]
NoCudaGraph = Annotated[
    bool, typer.Option("--no-cuda-graph", help="Run decode rounds step by step; same tokens, slower.")
]
Spec = Annotated[
    str | None, typer.Option("--spec", help="mtp: draft with the model's own MTP layer.", metavar="mtp")
]
DraftTokens = Annotated[int | None, whole("--draft-tokens", "Tokens to draft a round, 1..5; needs --spec.")]
LmHeadDraft = Annotated[
    bool, typer.Option("--lm-head-draft", help="Score drafts with the artifact's proposal head.")
]
Threads = Annotated[int | None, whole("--threads", "CPU threads (default: from the machine).")]
Template = Annotated[
    Path | None, typer.Option("--chat-template", help="Jinja file in place of the artifact's template.")
]
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="Answer without a thinking block.")]
Temperature = Annotated[float | None, number("--temperature", "[0, 2]; 0 is greedy.")]
TopP = Annotated[float | None, number("--top-p", "[0, 1]")]
MinP = Annotated[float | None, number("--min-p", "[0, 1]")]
TopK = Annotated[int | None, whole("--top-k", "0..20; 0 is the cap of 20.")]
PresencePenalty = Annotated[float | None, number("--presence-penalty", "[-2, 2]")]
FrequencyPenalty = Annotated[float | None, number("--frequency-penalty", "[-2, 2]")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")]
LogLevel = Annotated[str, typer.Option("--log-level", help="|".join(LOG_LEVELS))]


def check_log_level(level: str) -> bool:
    """OptionError for an unknown level; is it one that leaves out mere information?"""
    if level not in LOG_LEVELS:
        raise OptionError(f"invalid log level: {level}; use one of {', '.join(LOG_LEVELS)}")
    return LOG_LEVELS.index(level) >= LOG_LEVELS.index("warning")


def engine_options(
    *,
    max_context: int | None,
    prefill_chunk: int,
    max_concurrency: int,
    kv_dtype: str,
    kv_capacity: str | None,
    headroom_mib: int | None,
    state_slots: int | None,
    turn_anchors: int,
    no_prefix_reuse: bool,
    threads: int | None,
    chat_template: Path | None,
    device: str,
    no_cuda_graph: bool,
    spec: str | None,
    draft_tokens: int | None,
    lm_head_draft: bool,
    **more: Any,
) -> "EngineOptions":
    """The options of loading, checked, with errors that name flags; `more` goes through as it is."""
    from ninfer.api.options import EngineOptions

    if kv_dtype not in list(KvFormat):
        raise OptionError(f"invalid --kv-dtype: {kv_dtype}; use one of {', '.join(KvFormat)}")
    if no_prefix_reuse and state_slots is not None:
        raise OptionError("--no-prefix-reuse cannot be combined with --device-state-slots; drop one of them")
    if headroom_mib is not None and kv_capacity != "auto":
        raise OptionError("--vram-headroom-mib requires --kv-capacity auto")
    with flags(
        state_slots="--device-state-slots",
        headroom_mib="--vram-headroom-mib",
        max_pending="--max-pending-requests",
    ):
        return EngineOptions(
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            max_concurrency=max_concurrency,
            kv_capacity=_capacity(kv_capacity),
            headroom_mib=headroom_mib,
            kv_dtype=kv_dtype,
            state_slots=state_slots,
            prefix_reuse=not no_prefix_reuse,
            turn_anchors=turn_anchors,
            chat_template=None if chat_template is None else read_text(chat_template, "chat template"),
            threads=threads,
            device=device,
            cuda_graph=not no_cuda_graph,
            spec=spec,
            draft_tokens=drafts(spec, draft_tokens, lm_head_draft),
            lm_head_draft=lm_head_draft,
            **more,
        )


def drafts(spec: str | None, tokens: int | None, head: bool) -> int:
    """What --spec and --draft-tokens come to: tokens a round, 0 without them."""
    if spec is None:
        if tokens is not None or head:
            raise OptionError("--draft-tokens and --lm-head-draft require --spec mtp")
        return 0
    if spec in ("dflash", "dflash2"):
        raise OptionError(f"--spec {spec} isn't supported by this version; use mtp")
    if spec != "mtp":
        raise OptionError(f"invalid speculative backend: {spec}; use mtp")
    from ninfer.api.options import MOST_DRAFTS

    if tokens is None or not 1 <= tokens <= MOST_DRAFTS:
        raise OptionError(f"--spec mtp requires --draft-tokens in [1, {MOST_DRAFTS}]")
    return tokens


def read_bytes(path: Path, what: str) -> bytes:
    """A file named by an option."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read the {what} {path}: {error.strerror}") from None


def read_text(path: Path, what: str) -> str:
    """A text file named by an option."""
    try:
        return read_bytes(path, what).decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"the {what} {path} is not valid UTF-8 (byte {error.start})") from None


def _capacity(text: str | None) -> int | Literal["auto"] | None:
    """The value of --kv-capacity."""
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 2**32:
        raise OptionError(f"invalid --kv-capacity: {text}; give a number of tokens or auto")
    return int(text)
