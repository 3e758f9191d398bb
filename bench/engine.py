"""What the prefix cache saves, and what the engine costs: time to first token of a conversation of about
2,000 tokens when it is new, continued, continued after a cancelled turn, and with its last message edited;
the host's share of a decode round for 1, 4 and 8 requests.

Ratios of one run; every figure is the median of `--repeat` runs.

    python -m bench.engine --artifact models/smollm2-135m-instruct.ninfer
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

from ninfer.api import Done, Engine, EngineOptions, GenerationOptions, Output, PromptProgress, Statistics

TEXT = Path(__file__).parent.parent / "tests" / "data" / "python_reference.txt"
GREEDY = GenerationOptions(max_new=24, temperature=0.0)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversation(engine: Engine, tokens: int, salt: str) -> list[dict[str, str]]:
    """A system message, a long text and a question, together about `tokens` long; `salt` makes it new."""
    text = f"{salt}\n" + TEXT.read_text(encoding="utf-8")
    pieces = engine.frontend.encode(text)[:tokens]
    return [
        message("system", f"You answer questions about a text. ({salt})"),
        message("user", engine.frontend.decode(pieces) + "\n\nWhat is this text about?"),
    ]


def finish(engine: Engine, messages: list[dict[str, str]], options: GenerationOptions = GREEDY) -> Statistics:
    """Statistics of a whole answer."""
    for event in engine.chat(messages, options):
        if isinstance(event, Done):
            return event.statistics
    raise AssertionError("an answer ends with Done")


def answered(engine: Engine, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation with its answer."""
    return [*messages, message("assistant", engine.chat(messages, GREEDY).text())]


def first_token(statistics: Statistics) -> float:
    assert statistics.first_token_seconds is not None
    return statistics.first_token_seconds - statistics.queue_seconds


def continued(engine: Engine, tokens: int, salt: str) -> Statistics:
    turn = answered(engine, conversation(engine, tokens, salt))
    return finish(engine, [*turn, message("user", "And who might want to read it?")])


def after_cancel(engine: Engine, tokens: int, salt: str) -> Statistics:
    """A turn is cancelled while it is answered, and another question asked instead."""
    turn = answered(engine, conversation(engine, tokens, salt))
    generation = engine.chat([*turn, message("user", "Tell me a long story about it.")], GREEDY)
    for event in generation:
        if isinstance(event, Output):
            generation.cancel()
    return finish(engine, [*turn, message("user", "And who might want to read it?")])


def after_cancelled_prefill(engine: Engine, tokens: int, salt: str) -> Statistics:
    """The first, long message is cancelled after a chunk and sent again."""
    messages = conversation(engine, tokens, salt)
    generation = engine.chat(messages, GREEDY)
    for event in generation:
        if isinstance(event, PromptProgress):
            generation.cancel()
    return finish(engine, messages)


def after_edit(engine: Engine, tokens: int, salt: str) -> Statistics:
    """The last of three messages is written anew."""
    turn = answered(engine, conversation(engine, tokens, salt))
    finish(engine, [*turn, message("user", "And who might want to read it?")])
    return finish(engine, [*turn, message("user", "Who wrote it?")])


def host_share(engine: Engine, requests: int) -> tuple[float, float, float]:
    """(host share, milliseconds a round, tokens a second) of `requests` answers at a time."""
    options = GenerationOptions(max_new=64, temperature=0.0, prefix_reuse=False)
    before = engine.statistics()
    generations = [engine.chat([message("user", f"Count from {i}.")], options) for i in range(requests)]
    for generation in generations:
        generation.text()
    after = engine.statistics()
    rounds, seconds = after.rounds - before.rounds, after.decode_seconds - before.decode_seconds
    total = seconds + after.engine_boundary - before.engine_boundary
    device = after.decode_device_seconds - before.decode_device_seconds
    return 1 - device / total, 1e3 * seconds / rounds, (after.decode_tokens - before.decode_tokens) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kv-dtype", default="bf16")
    args = parser.parse_args()
    options = EngineOptions(
        max_context=4096,
        prefill_chunk=512,
        max_concurrency=8,
        kv_capacity=4 * 4096,
        kv_dtype=args.kv_dtype,
        max_pending=8,
    )
    with Engine.load(args.artifact, options) as engine:
        print(f"{engine.description.name}, {engine.description.threads} threads, KV {args.kv_dtype}")
        finish(engine, conversation(engine, 200, "warm up"))
        cases: dict[str, Callable[[Engine, int, str], Statistics]] = {
            "cold": lambda e, n, salt: finish(e, conversation(e, n, salt)),
            "continued": continued,
            "after a cancelled answer": after_cancel,
            "after a cancelled prefill": after_cancelled_prefill,
            "last message edited": after_edit,
        }
        results: dict[str, list[Statistics]] = {name: [] for name in cases}
        for turn in range(args.repeat):
            for name, case in cases.items():
                results[name].append(case(engine, args.tokens, f"{name} {turn}"))
        cold = median(first_token(s) for s in results["cold"])
        print(f"{'time to first token':<28}{'prompt':>8}{'reused':>8}{'ms':>10}{'of cold':>10}")
        for name, runs in results.items():
            seconds = median(first_token(s) for s in runs)
            print(
                f"{name:<28}{runs[-1].prompt_tokens:>8}{runs[-1].reused_tokens:>8}{1e3 * seconds:>10.1f}"
                f"{100 * seconds / cold:>9.1f}%"
            )
        print(f"{'decode':<28}{'host':>8}{'ms/round':>12}{'tok/s':>10}")
        for requests in (1, 4, 8):
            runs = [host_share(engine, requests) for _ in range(args.repeat)]
            share, ms, rate = (median(values) for values in zip(*runs, strict=True))
            print(f"{f'{requests} at a time':<28}{100 * share:>7.2f}%{ms:>12.2f}{rate:>10.1f}")


if __name__ == "__main__":
    main()
