"""`ninfer-perplexity`: how well a model predicts texts, as a table and a report."""

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from ninfer.cli.common import flags, program, run, whole
from ninfer.devices import NAMES, check_device
from ninfer.errors import OptionError
from ninfer.formats import KvFormat

app = program()

# Known options that wait for later work: refused in a sentence, never ignored.
_LATER = {
    "--tp": "several GPUs",
    "--devices": "several GPUs",
    "--embedding-host": "weights in the host's memory",
}
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "critical", "off")


@app.command()
def perplexity(
    model: Annotated[
        Path,
        typer.Argument(help="A .ninfer artifact, a Hugging Face folder or a GGUF file.", metavar="MODEL"),
    ],
    corpus: Annotated[Path | None, typer.Option("--corpus", help="Manifest of the texts to score.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Score the corpus's quick selection: one text a domain.")
    ] = False,
    text: Annotated[Path | None, typer.Option("--text", help="Score this UTF-8 file instead.")] = None,
    context: Annotated[int, whole("--context", "Tokens of a window.")] = 4096,
    stride: Annotated[int, whole("--stride", "New tokens that each further window scores.")] = 2048,
    device: Annotated[
        str, typer.Option("--device", help=f"{NAMES}: the first GPU that can be used, else the CPU.")
    ] = "auto",
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help=f"KV cache format: {'|'.join(KvFormat)}.")
    ] = "fp8",
    threads: Annotated[int | None, whole("--threads", "CPU threads (default: from the machine).")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for report.json, absent or empty (default: in profiles/)."),
    ] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="|".join(_LOG_LEVELS))] = "info",
) -> int:
    """Score every token of the texts but the first, in windows that start from nothing."""
    begin = perf_counter()
    if log_level not in _LOG_LEVELS:
        raise OptionError(f"invalid log level: {log_level}; use one of {', '.join(_LOG_LEVELS)}")
    if kv_dtype not in tuple(KvFormat):
        raise OptionError(f"invalid KV format: {kv_dtype}; use one of {', '.join(KvFormat)}")
    check_device(device, "--device")
    if (corpus is None) == (text is None):
        raise OptionError("pass exactly one of --corpus or --text")
    if quick and corpus is None:
        raise OptionError("--quick needs --corpus: it is a selection of a corpus's texts")

    from ninfer.api import Scorer, ScorerOptions
    from ninfer.api.corpus import read_manifest, read_text
    from ninfer.api.perplexity import score_stream, window_plan
    from ninfer.cli import perplexity_report as report
    from ninfer.cli.progress import conversion_progress

    window_plan(2, context, stride)  # checks both
    if output is not None:
        report.check_output(output)
    mark = perf_counter()
    if corpus is not None:
        texts = read_manifest(corpus, quick=quick)
    else:
        assert text is not None
        texts = read_text(text)
    read_seconds = perf_counter() - mark
    quiet = log_level in _LOG_LEVELS[_LOG_LEVELS.index("warning") :]
    with flags():
        options = ScorerOptions(context=context, kv_dtype=kv_dtype, threads=threads, device=device)
    with conversion_progress(quiet) as progress:
        scorer = Scorer.load(model, options, progress=progress)
    with scorer:
        mark = perf_counter()
        tokens = [scorer.encode(stream.text) for stream in texts.streams]
        for stream, ids in zip(texts.streams, tokens, strict=True):
            if len(ids) < 2:
                raise OptionError(f"the text {stream.path} has {len(ids)} tokens; scoring needs at least 2")
        read_seconds += perf_counter() - mark
        plans = [window_plan(len(ids), context, stride) for ids in tokens]
        output = output or report.default_output(scorer.description, texts)
        report.check_output(output)
        output.mkdir(parents=True, exist_ok=True)
        mark = perf_counter()
        fed = sum(window.end - window.begin - 1 for plan in plans for window in plan)
        with report.Progress(fed, quiet) as shown:
            scores = [
                score_stream(scorer, ids, plan, shown.on(stream.id))
                for stream, ids, plan in zip(texts.streams, tokens, plans, strict=True)
            ]
        end = perf_counter()
        document = report.document(
            scorer.description,
            texts,
            scores,
            stride=stride,
            seconds={
                "load_seconds": scorer.description.load_seconds,
                "read_and_tokenize_seconds": read_seconds,
                "score_seconds": end - mark,
                "total_seconds": end - begin,
            },
        )
    path = report.write(document, output)
    print(report.table(document, path))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ninfer-perplexity`."""
    return run(app, "ninfer-perplexity", argv, later=_LATER)


if __name__ == "__main__":
    sys.exit(main())
