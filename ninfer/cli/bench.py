"""`ninfer-bench`: how fast prefill and decode are, as a table, JSON or CSV."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ninfer.cli import options
from ninfer.cli.common import flags, number, program, run, whole
from ninfer.errors import OptionError

if TYPE_CHECKING:
    from ninfer.api import EngineOptions
    from ninfer.api.throughput import Case

app = program()

_FORMATS = ("table", "json", "csv")
_PROMPT, _GENERATED = (512,), (128,)


@app.command()
def bench(
    model: Annotated[
        Path | None,
        typer.Argument(help="As --weights.", metavar="[MODEL]", show_default=False),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            help="A .ninfer artifact, a Hugging Face folder, a GGUF file, or synthetic:GEOMETRY/PROFILE.",
        ),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option("--corpus", help="File of decimal token ids to feed (default: pseudo-random ids)."),
    ] = None,
    n_prompt: Annotated[
        str | None, typer.Option("--n-prompt", "-p", help="Prefill so many tokens.", metavar="LIST")
    ] = None,
    n_gen: Annotated[
        str | None, typer.Option("--n-gen", "-n", help="Decode so many tokens.", metavar="LIST")
    ] = None,
    prompt_gen: Annotated[
        str | None,
        typer.Option(
            "--prompt-gen", "-pg", help="Prefill P and decode G in one request.", metavar='"P,G;..."'
        ),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option("--depth", "-d", help="Decode behind so many tokens (0).", metavar="LIST"),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", help="Decode so many requests at a time (1).", metavar="LIST"),
    ] = None,
    repetitions: Annotated[int, whole("--repetitions", "Measured runs of each test.", "-r")] = 5,
    warmup: Annotated[int, whole("--warmup", "Runs before them that don't count.")] = 1,
    max_ctx: Annotated[
        int | None, whole("--max-ctx", "Tokens of context (the least that the tests need).")
    ] = None,
    prefill_chunk: options.PrefillChunk = 1024,
    kv_dtype: options.KvDtype = "bf16",
    device: options.Device = "auto",
    no_cuda_graph: options.NoCudaGraph = False,
    spec: options.Spec = None,
    draft_tokens: options.DraftTokens = None,
    lm_head_draft: options.LmHeadDraft = False,
    mtp_draft_tokens: Annotated[
        int | None, whole("--mtp-draft-tokens", "The same as --spec mtp --draft-tokens; 0: no drafts.")
    ] = None,
    assume_acceptance: Annotated[
        float | None,
        number(
            "--assume-acceptance",
            "Also tell the decode rate if this share of drafts stood, [0, 1]; marked as assumed.",
        ),
    ] = None,
    threads: options.Threads = None,
    profile_measured: Annotated[
        bool,
        typer.Option("--profile-measured", help="Mark the measured run for a profiler (one test, -r 1)."),
    ] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="|".join(_FORMATS))] = "table",
    output_file: Annotated[
        Path | None, typer.Option("--output-file", help="Write there instead of stdout.")
    ] = None,
    log_level: options.LogLevel = "info",
) -> int:
    """Measure prefill (pp), decode (tg) and both (pp+tg). Without -p, -n and -pg: pp512 and tg128."""
    quiet = options.check_log_level(log_level)
    path = _one(model, weights)
    if output not in _FORMATS:
        raise OptionError(f"invalid --output: {output}; use one of {', '.join(_FORMATS)}")
    if repetitions < 1:
        raise OptionError("--repetitions must be at least 1, not 0")
    if output_file is not None and not output_file.parent.is_dir():
        raise OptionError(f"the folder {output_file.parent} of --output-file doesn't exist; make it first")
    tests = _tests(n_prompt, n_gen, prompt_gen, depth, concurrency)
    if profile_measured and (len(tests) != 1 or repetitions != 1):
        raise OptionError("--profile-measured needs exactly one test and -r 1")
    drafts = _drafts(spec, draft_tokens, mtp_draft_tokens, lm_head_draft)
    if assume_acceptance is not None and not drafts:
        raise OptionError("--assume-acceptance requires --spec mtp")
    if assume_acceptance is not None and not 0 <= assume_acceptance <= 1:
        raise OptionError(f"--assume-acceptance must be between 0 and 1, not {assume_acceptance:g}")
    context = _context(tests, max_ctx)
    ids = None if corpus is None else _ids(corpus)
    engine_options = _engine_options(
        tests,
        context,
        prefill_chunk,
        kv_dtype,
        device,
        threads,
        cuda_graph=not no_cuda_graph,
        drafts=drafts,
        lm_head_draft=lm_head_draft,
    )

    from ninfer.cli import bench_report as report
    from ninfer.cli.answer import load
    from ninfer.cli.bench_run import Measured, Settings, run_tests

    with load(path, engine_options, quiet=quiet) as engine:
        settings = Settings(
            repetitions,
            warmup,
            profile_measured,
            corpus,
            None if ids is None else len(ids),
            quiet,
            assume_acceptance,
        )
        shown = {"table": report.table, "json": report.as_json, "csv": report.as_csv}[output]
        measured: list[Measured] = []
        text = ""
        for test in run_tests(engine, tests, ids, settings):
            measured.append(test)
            document = report.document(engine, measured, settings)
            text = shown(document).rstrip("\n") + "\n"
            if output_file is not None:  # a run that is broken off keeps what it had
                output_file.write_text(text, encoding="utf-8")
    if output_file is None:
        print(text, end="")
    return 0


def _one(model: Path | None, weights: Path | None) -> Path:
    if (model is None) == (weights is None):
        raise OptionError("name the model, either as MODEL or with --weights")
    found = weights if model is None else model
    assert found is not None
    return found


def _drafts(spec: str | None, tokens: int | None, mtp_tokens: int | None, head: bool) -> int:
    if mtp_tokens is None:
        return options.drafts(spec, tokens, head)
    if spec is not None or tokens is not None:
        raise OptionError("--mtp-draft-tokens cannot be combined with --spec and --draft-tokens; drop one")
    return options.drafts("mtp" if mtp_tokens else None, mtp_tokens or None, head)


def _tests(
    prompts: str | None, generated: str | None, pairs: str | None, depths: str | None, rows: str | None
) -> "list[Case]":
    from ninfer.api.throughput import cases

    given = _list(prompts, "--n-prompt"), _list(generated, "--n-gen"), _pairs(pairs)
    if prompts is generated is pairs is None:
        given = _PROMPT, _GENERATED, []
    if (depths is not None or rows is not None) and not given[1]:
        raise OptionError("--depth and --concurrency are about decoding; give --n-gen as well")
    concurrencies = _list(rows, "--concurrency") or (1,)
    if max(concurrencies) > 8:
        raise OptionError(f"--concurrency must be between 1 and 8, not {max(concurrencies)}")
    return cases(*given, depths=_list(depths, "--depth", least=0) or (0,), concurrencies=concurrencies)


def _list(text: str | None, flag: str, least: int = 1) -> tuple[int, ...]:
    if text is None:
        return ()
    items = text.split(",")
    if not all(item.strip().isascii() and item.strip().isdigit() for item in items):
        raise OptionError(f"{flag} must be whole numbers with commas between, not {text!r:.80}")
    numbers = tuple(map(int, items))
    for one in numbers:
        if not least <= one <= 2**24:
            raise OptionError(f"{flag} must be between {least} and {2**24}, not {one}")
    return numbers


def _pairs(text: str | None) -> list[tuple[int, int]]:
    found = []
    for item in text.split(";") if text is not None else ():
        numbers = _list(item, "--prompt-gen")
        if len(numbers) != 2:
            raise OptionError(f'--prompt-gen must be pairs "P,G;P,G", not {text!r:.80}')
        found.append((numbers[0], numbers[1]))
    return found


def _context(tests: "Sequence[Case]", max_ctx: int | None) -> int:
    """The context to load with; OptionError naming the test that doesn't fit."""
    largest = max(tests, key=lambda case: case.context)
    if max_ctx is None:
        return largest.context
    if max_ctx < largest.context:
        raise OptionError(f"--max-ctx must be at least {largest.context} for {largest.label}, not {max_ctx}")
    return max_ctx


def _ids(path: Path) -> list[int]:
    words = options.read_text(path, "corpus").split()
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise OptionError(f"the corpus {path} must be decimal token ids with white space between")
    return list(map(int, words))


def _engine_options(
    tests: "Sequence[Case]",
    context: int,
    prefill_chunk: int,
    kv_dtype: str,
    device: str,
    threads: int | None,
    *,
    cuda_graph: bool,
    drafts: int,
    lm_head_draft: bool,
) -> "EngineOptions":
    from ninfer.api import EngineOptions
    from ninfer.formats import KvFormat

    if kv_dtype not in list(KvFormat):
        raise OptionError(f"invalid --kv-dtype: {kv_dtype}; use one of {', '.join(KvFormat)}")
    rows = max(case.concurrency for case in tests)
    pages = max(case.concurrency * -(-case.context // 64) for case in tests)
    with flags(max_context="--max-ctx", max_concurrency="--concurrency"):
        return EngineOptions(
            max_context=context,
            prefill_chunk=prefill_chunk,
            max_concurrency=rows,
            kv_capacity=max(64 * pages, context),
            kv_dtype=kv_dtype,
            prefix_reuse=False,
            pending_timeout=None,
            threads=threads,
            device=device,
            cuda_graph=cuda_graph,
            spec="mtp" if drafts else None,
            draft_tokens=drafts,
            lm_head_draft=lm_head_draft,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ninfer-bench`."""
    return run(app, "ninfer-bench", argv, later=options.LATER, misuse=2)


if __name__ == "__main__":
    sys.exit(main())
