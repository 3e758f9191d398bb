"""Ask one question and print the answer as it is made.

python examples/answer.py models/smollm2-135m-instruct.ninfer "Why is the sky blue?"
"""

import sys

import ninfer


def main(model: str, question: str) -> None:
    with ninfer.Engine.load(model) as engine:
        options = ninfer.GenerationOptions(max_new=200, seed=7)
        for event in engine.chat([{"role": "user", "content": question}], options):
            if isinstance(event, ninfer.Output):
                print(event.text, end="", flush=True)
            elif isinstance(event, ninfer.Done):
                rate = event.statistics.decode_rate
                print(f"\n[{event.statistics.generated_tokens} tokens, {rate or 0:.0f} tok/s]")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2])
