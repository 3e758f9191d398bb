"""`ninfer`: one answer, or a chat on a terminal.

The answer goes to stdout as it is made; reasoning, progress and the report go to stderr.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ninfer.cli import options
from ninfer.cli.common import flags, program, run, whole
from ninfer.errors import OptionError

app = program()

_DEFAULT_MAX_NEW = 128


@app.command()
def ninfer(
    model: options.Model,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this user message.")] = None,
    messages: Annotated[
        Path | None, typer.Option("--messages", help="Answer the conversation in this JSON file.")
    ] = None,
    max_new: Annotated[
        int | None, whole("--max-new", "Tokens to generate at most (128; chat: no limit).")
    ] = None,
    max_context: options.MaxContext = None,
    prefill_chunk: options.PrefillChunk = 1024,
    max_concurrency: options.MaxConcurrency = 1,
    kv_dtype: options.KvDtype = "bf16",
    kv_capacity: options.KvCapacity = None,
    headroom_mib: options.HeadroomMib = None,
    device_state_slots: options.DeviceStateSlots = None,
    turn_anchors: options.TurnAnchors = 1,
    no_prefix_reuse: options.NoPrefixReuse = False,
    device: options.Device = "auto",
    no_cuda_graph: options.NoCudaGraph = False,
    spec: options.Spec = None,
    draft_tokens: options.DraftTokens = None,
    lm_head_draft: options.LmHeadDraft = False,
    threads: options.Threads = None,
    chat_template: options.Template = None,
    no_thinking: options.NoThinking = False,
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
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    top_k: options.TopK = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: Annotated[int, whole("--seed", "Seed of the sampling.")] = 0,
    greedy: options.Greedy = False,
    raw_output: Annotated[
        bool, typer.Option("--raw-output", help="Everything to stdout, special tokens shown.")
    ] = False,
    print_token_ids: Annotated[
        bool, typer.Option("--print-token-ids", help="List the ids at the end.")
    ] = False,
    log_level: options.LogLevel = "info",
) -> int:
    """Answer one prompt (--prompt, --messages or stdin); without one, chat on the terminal."""
    one_shot = prompt is not None or messages is not None or not sys.stdin.isatty()
    conversation, tools = _conversation(prompt, messages) if one_shot else ([], None)
    quiet = options.check_log_level(log_level)
    if max_new == 0:
        raise OptionError("--max-new must be at least 1, not 0")

    from ninfer.api import GenerationOptions
    from ninfer.cli.answer import Answerer, load

    with flags():
        chosen = GenerationOptions(
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
    engine_options = options.engine_options(
        max_context=max_context,
        prefill_chunk=prefill_chunk,
        max_concurrency=max_concurrency,
        kv_dtype=kv_dtype,
        kv_capacity=kv_capacity,
        headroom_mib=headroom_mib,
        state_slots=device_state_slots,
        turn_anchors=turn_anchors,
        no_prefix_reuse=no_prefix_reuse,
        threads=threads,
        device=device,
        no_cuda_graph=no_cuda_graph,
        spec=spec,
        draft_tokens=draft_tokens,
        lm_head_draft=lm_head_draft,
        chat_template=chat_template,
    )
    with load(model, engine_options, quiet=quiet) as engine:
        answerer = Answerer(engine, chosen, print_token_ids=print_token_ids, quiet=quiet, chat=not one_shot)
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

        return parse_messages_file(options.read_bytes(messages, "messages file"))
    text = sys.stdin.buffer.read() if prompt is None else prompt.encode(errors="surrogateescape")
    source = "stdin" if prompt is None else "--prompt"
    try:
        content = text.decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"{source} is not valid UTF-8 (byte {error.start}); convert the text") from None
    if not content.strip():
        raise OptionError(f"the prompt from {source} is empty; give it some text")
    return [{"role": "user", "content": content}], None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ninfer`."""
    return run(app, "ninfer", argv, prefix="error", later=options.LATER)


if __name__ == "__main__":
    sys.exit(main())
