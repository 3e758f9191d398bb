"""`python -m bench.tasks`: tasks that a program can check, by model, KV format and category."""

import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from bench.tasks import plot, report, suite, table
from bench.tasks.run import GroupRuns, Outcome, engine_options, run_groups, subject
from ninfer.api import Engine
from ninfer.cli.common import flags, printable, program, run, whole
from ninfer.cli.perplexity_report import check_output, write
from ninfer.cli.progress import conversion_progress
from ninfer.errors import OptionError
from ninfer.formats import KvFormat

app = program()
_NAME = "python -m bench.tasks"
_argv: Sequence[str] = ()


@app.command()
def tasks(
    paths: Annotated[
        list[str] | None,
        typer.Argument(help=".ninfer artifacts, Hugging Face folders, GGUF files.", metavar="MODEL..."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A further model under a name of its own.", metavar="NAME=PATH"),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help=f"KV cache formats, with commas: {'|'.join(KvFormat)}.")
    ] = "bf16",
    chosen: Annotated[
        str, typer.Option("--tasks", help="Tasks or categories, with commas (default: all).", metavar="NAMES")
    ] = "",
    per_task: Annotated[int, whole("--per-task", "Held-out instances of each task.")] = 20,
    concurrency: Annotated[int, whole("--concurrency", "Requests at a time.")] = 8,
    reuse: Annotated[bool, typer.Option("--reuse", help="Reuse what earlier prompts computed.")] = False,
    max_context: Annotated[
        int | None, whole("--max-context", "Tokens of one sequence at most (default: what the tasks need).")
    ] = None,
    draft_tokens: Annotated[
        int, whole("--draft-tokens", "Tokens that an MTP layer drafts a round, 0..5 (0: no speculation).")
    ] = 0,
    threads: Annotated[int | None, whole("--threads", "CPU threads (default: from the machine).")] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require", help="Exit with 1 unless a task or category passes so often.", metavar="NAME>=SHARE"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for report.json, report.md and plot.svg, absent or empty."),
    ] = None,
) -> int:
    """Answer held-out instances of every task greedily, to the model's own stop, and check them exactly."""
    models = _models(paths or [], model or [])
    formats = _formats(kv_dtype)
    requirements = [report.requirement(text) for text in require or []]
    if output is not None:
        check_output(output)
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    groups = suite.choose(suite.available(), names, per_task)
    report.check_requirements(requirements, groups)

    with conversion_progress(False) as progress:
        subjects = [subject(label, path, groups, progress) for label, path in models.items()]
    with flags(max_concurrency="--concurrency"):
        plans = [
            (
                item,
                engine_options(
                    item,
                    groups,
                    kv_dtype=kv,
                    concurrency=concurrency,
                    reuse=reuse,
                    max_context=max_context,
                    threads=threads,
                    draft_tokens=draft_tokens,
                ),
            )
            for item in subjects
            for kv in formats
        ]
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)  # what can't be made fails before the long part
    combinations = []
    for item, options in plans:
        with Engine.load(item.path, options) as engine:
            done: list[GroupRuns] = []
            rows = options.max_concurrency
            for group in run_groups(engine, groups, item.prompts, concurrency=rows, reuse=reuse):
                done.append(group)
                _tell(f"{item.label}/{options.kv_dtype}", group)
            combinations.append(report.Combination(item, engine.description, rows, tuple(done)))
    document = report.document(
        combinations,
        groups,
        requirements,
        command=shlex.join(["python", "-m", "bench.tasks", *_argv]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment={
            "python": platform.python_version(),
            "ninfer": version("ninfer"),
            "torch": version("torch"),
            "machine": platform.machine(),
        },
        options={
            "per_task": per_task,
            "concurrency": concurrency,
            "prefix_reuse": reuse,
            "temperature": 0,
            "draft_tokens": draft_tokens,
        },
    )
    print(table.text(document))
    if output is not None:
        _write(document, output)
    missed = report.unmet(document)
    for sentence in missed:
        print(f"{_NAME}: {printable(sentence)}", file=sys.stderr)
    return 1 if missed else 0


def _models(paths: Sequence[str], named: Sequence[str]) -> dict[str, Path]:
    models: dict[str, Path] = {}
    for text in (*paths, *named):
        name, equals, path = text.partition("=")
        if text in named and not (name and equals and path):
            raise OptionError(f"--model {text!r:.120} must be NAME=PATH")
        if text not in named:
            name, path = Path(text).stem or text, text
        if name in models:
            raise OptionError(f"two models are called {name}; give one another name with --model NAME=PATH")
        models[name] = Path(path)
    if not models:
        raise OptionError("name at least one model: a path, or --model NAME=PATH")
    return models


def _formats(text: str) -> list[str]:
    formats = [name.strip() for name in text.split(",")]
    for name in formats:
        if name not in tuple(KvFormat):
            raise OptionError(f"invalid KV format: {name!r:.80}; use {', '.join(KvFormat)}")
        if formats.count(name) > 1:
            raise OptionError(f"the KV format {name} is named twice")
    return formats


def _tell(label: str, group: GroupRuns) -> None:
    passed = sum(run.outcome is Outcome.PASSED for run in group.runs)
    line = f"{printable(label)} {group.name}: {passed}/{len(group.runs)} in {group.seconds:.1f} s"
    print(line, file=sys.stderr, flush=True)


def _write(document: dict, output: Path) -> None:
    written = [write(document, output), output / "report.md"]
    written[1].write_text(table.markdown(document), encoding="utf-8", newline="\n")
    try:
        plot.draw(document, output / "plot.svg")
        written.append(output / "plot.svg")
    except OptionError as error:
        # The figures took long to get and are in the report.
        print(f"{_NAME}: {error}", file=sys.stderr)
    print("\n" + "\n".join(map(str, written)))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code is 1 for an error and for a requirement that isn't met."""
    global _argv
    _argv = sys.argv[1:] if argv is None else argv
    return run(app, _NAME, argv)


if __name__ == "__main__":
    sys.exit(main())
