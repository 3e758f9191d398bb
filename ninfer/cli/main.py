"""`ninfer`: one answer, or a chat on a terminal.

The answer goes to stdout as it is made; reasoning, progress and the report go to stderr.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ninfer.cli.common import flags, number, program, run, whole
from ninfer.errors import OptionError
from ninfer.formats import KvFormat

app = program()

# Known options that wait for later work: refused in a sentence, never ignored.
# Option -> what it needs.
_LATER = {
    "--device": "the CUDA backend",
    "--no-cuda-graph": "the CUDA backend",
    "--embedding-host": "the CUDA backend",
    "--devices": "several GPUs",
    "--tp": "several GPUs",
    "--no-tp-mailbox": "several GPUs",
    "--spec": "speculative decoding",
    "--draft-tokens": "speculative decoding",
    "--lm-head-draft": "speculative decoding",
    "--vision": "vision",
    "--vision-device": "vision",
    "--max-vision-tokens": "vision",
}
_DEFAULT_MAX_NEW = 128
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "critical", "off")


@app.command()
def ninfer(
    model: Annotated[
        Path,
        typer.Argument(help="A .ninfer artifact, a Hugging Face folder or a GGUF file.", metavar="MODEL"),
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this user message.")] = None,
    messages: Annotated[
        Path | None, typer.Option("--messages", help="Answer the conversation in this JSON file.")
    ] = None,
    max_new: Annotated[
        int | None, whole("--max-new", "Tokens to generate at most (128; chat: no limit).")
    ] = None,
    max_context: Annotated[
        int | None, whole("--max-context", "Tokens of context (2048, or what the model has).")
    ] = None,
    prefill_chunk: Annotated[
        int, whole("--prefill-chunk", "Prompt tokens per step, a multiple of 128.")
    ] = 1024,
    max_concurrency: Annotated[
        int, whole("--max-concurrency", "Requests that memory is planned for, 1..8.")
    ] = 1,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="|".join(KvFormat))] = "bf16",
    kv_capacity: Annotated[
        str | None,
        typer.Option(
            "--kv-capacity",
            help="Tokens of KV cache, or auto: what memory allows (--max-context).",
            metavar="N|auto",
        ),
    ] = None,
    headroom_mib: Annotated[
        int | None, whole("--vram-headroom-mib", "Memory that --kv-capacity auto leaves free (1024).")
    ] = None,
    device_state_slots: Annotated[
        int | None,
        whole("--device-state-slots", "Recurrent states that the prefix cache keeps (concurrency + 4)."),
    ] = None,
    turn_anchors: Annotated[
        int, whole("--turn-anchors", "Message starts before the last one that are kept exactly.")
    ] = 1,
    no_prefix_reuse: Annotated[
        bool, typer.Option("--no-prefix-reuse", help="Compute every prompt from its beginning.")
    ] = False,
    threads: Annotated[int | None, whole("--threads", "CPU threads (default: from the machine).")] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="Jinja file in place of the artifact's template.")
    ] = None,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Answer without a thinking block.")
    ] = False,
    reasoning_effort: Annotated[
        str | None, typer.Option("--reasoning-effort", help="none|minimal|low|medium|high|xhigh|max")
    ] = None,
    thinking_budget: Annotated[
        int | None, whole("--thinking-budget", "Close the thinking block after N tokens.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="Stop before this text in the answer (repeatable).", metavar="TEXT"),
    ] = None,
    reasoning_stop: Annotated[
        list[str] | None,
        typer.Option("--reasoning-stop", help="Stop before this text in the reasoning.", metavar="TEXT"),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, whole("--stop-token-id", "Stop at this token id (repeatable).")
    ] = None,
    temperature: Annotated[float | None, number("--temperature", "[0, 2]; 0 is greedy.")] = None,
    top_p: Annotated[float | None, number("--top-p", "[0, 1]")] = None,
    min_p: Annotated[float | None, number("--min-p", "[0, 1]")] = None,
    top_k: Annotated[int | None, whole("--top-k", "0..20; 0 is the cap of 20.")] = None,
    presence_penalty: Annotated[float | None, number("--presence-penalty", "[-2, 2]")] = None,
    frequency_penalty: Annotated[float | None, number("--frequency-penalty", "[-2, 2]")] = None,
    seed: Annotated[int, whole("--seed", "Seed of the sampling.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")] = False,
    raw_output: Annotated[
        bool, typer.Option("--raw-output", help="Everything to stdout, special tokens shown.")
    ] = False,
    print_token_ids: Annotated[
        bool, typer.Option("--print-token-ids", help="List the ids at the end.")
    ] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="|".join(_LOG_LEVELS))] = "info",
) -> int:
    """Answer one prompt (--prompt, --messages or stdin); without one, chat on the terminal."""
    one_shot = prompt is not None or messages is not None or not sys.stdin.isatty()
    conversation, tools = _conversation(prompt, messages) if one_shot else ([], None)
    if log_level not in _LOG_LEVELS:
        raise OptionError(f"invalid log level: {log_level}; use one of {', '.join(_LOG_LEVELS)}")
    if max_new == 0:
        raise OptionError("--max-new must be at least 1, not 0")
    if kv_dtype not in list(KvFormat):
        raise OptionError(f"invalid --kv-dtype: {kv_dtype}; use one of {', '.join(KvFormat)}")
    if no_prefix_reuse and device_state_slots is not None:
        raise OptionError("--no-prefix-reuse cannot be combined with --device-state-slots; drop one of them")
    if headroom_mib is not None and kv_capacity != "auto":
        raise OptionError("--vram-headroom-mib requires --kv-capacity auto")

    from ninfer.api import EngineOptions, GenerationOptions
    from ninfer.cli.answer import Answerer, load

    with flags(state_slots="--device-state-slots", headroom_mib="--vram-headroom-mib"):
        options = GenerationOptions(
            max_new=_DEFAULT_MAX_NEW if max_new is None and one_shot else max_new,
            temperature=0.0 if greedy else temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            thinking=False if no_thinking else None,
            reasoning_effort=reasoning_effort,
            thinking_budget=thinking_budget,
            stop=tuple(stop or ()),
            reasoning_stop=tuple(reasoning_stop or ()),
            stop_token_ids=tuple(stop_token_id or ()),
            raw=raw_output,
        )
        engine_options = EngineOptions(
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            max_concurrency=max_concurrency,
            kv_capacity=_capacity(kv_capacity),
            headroom_mib=headroom_mib,
            kv_dtype=kv_dtype,
            state_slots=device_state_slots,
            prefix_reuse=not no_prefix_reuse,
            turn_anchors=turn_anchors,
            chat_template=None if chat_template is None else _read_text(chat_template, "chat template"),
            threads=threads,
        )
    quiet = log_level in _LOG_LEVELS[_LOG_LEVELS.index("warning") :]
    with load(model, engine_options, quiet=quiet) as engine:
        answerer = Answerer(engine, options, print_token_ids=print_token_ids, quiet=quiet, chat=not one_shot)
        if one_shot:
            answerer.answer(conversation, tools=tools)
            return 0
        from ninfer.cli.chat import Chat

        return Chat(answerer.answer).run()


def _conversation(prompt: str | None, messages: Path | None) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """The messages and tools of a one-shot run."""
    if prompt is not None and messages is not None:
        raise OptionError("pass exactly one of --prompt or --messages")
    if messages is not None:
        from ninfer.frontend import parse_messages_file

        return parse_messages_file(_read_bytes(messages, "messages file"))
    text = sys.stdin.buffer.read() if prompt is None else prompt.encode(errors="surrogateescape")
    source = "stdin" if prompt is None else "--prompt"
    try:
        content = text.decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"{source} is not valid UTF-8 (byte {error.start}); convert the text") from None
    if not content.strip():
        raise OptionError(f"the prompt from {source} is empty; give it some text")
    return [{"role": "user", "content": content}], None


def _capacity(text: str | None) -> int | Literal["auto"] | None:
    """The value of --kv-capacity."""
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 2**32:
        raise OptionError(f"invalid --kv-capacity: {text}; give a number of tokens or auto")
    return int(text)


def _read_bytes(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read the {what} {path}: {error.strerror}") from None


def _read_text(path: Path, what: str) -> str:
    try:
        return _read_bytes(path, what).decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"the {what} {path} is not valid UTF-8 (byte {error.start})") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ninfer`."""
    return run(app, "ninfer", argv, prefix="error", later=_LATER)


if __name__ == "__main__":
    sys.exit(main())
