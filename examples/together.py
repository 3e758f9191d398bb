"""Ask several questions at once and print each answer as it ends; Ctrl-C cancels them all.

python examples/together.py models/smollm2-135m-instruct.ninfer "Why is the sky blue?" "What is a prime?"
"""

import asyncio
import sys

import ninfer

OPTIONS = ninfer.EngineOptions(max_concurrency=4, max_context=1024, kv_capacity=4096)


async def ask(engine: ninfer.Engine, question: str) -> None:
    options = ninfer.GenerationOptions(max_new=100, seed=7)
    answer = ""
    async for event in engine.chat([{"role": "user", "content": question}], options):
        if isinstance(event, ninfer.Started):
            print(f"{question}: {event.prompt_tokens} tokens, {event.reused_tokens} of them known")
        elif isinstance(event, ninfer.Output):
            answer += event.text
    print(f"\n{question}\n{answer}")


async def main(model: str, questions: list[str]) -> None:
    with ninfer.Engine.load(model, OPTIONS) as engine:
        await asyncio.gather(*(ask(engine, question) for question in questions))
        statistics = engine.statistics()
        print(f"\n{statistics.decode_tokens} tokens in {statistics.rounds} rounds")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
