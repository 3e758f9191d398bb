"""Progress of long conversions on stderr."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def conversion_progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """`callback(stage, done, total)`: a bar on a terminal, a line for each stage elsewhere, nothing if quiet.

    Nothing is imported or drawn before the first call.
    """
    with contextlib.ExitStack() as stack:
        tasks: dict[str, Any] = {}
        bar: Any = None

        def callback(stage: str, done: int, total: int) -> None:
            nonlocal bar
            if quiet:
                return
            if not sys.stderr.isatty():
                if stage not in tasks:
                    print(f"{stage} ...", file=sys.stderr)
                tasks[stage] = None
                return
            if bar is None:
                bar = stack.enter_context(_bar())
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total or None)
            bar.update(tasks[stage], completed=done, total=total or None)

        yield callback


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))
