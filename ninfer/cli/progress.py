"""Progress of long conversions on stderr."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def conversion_progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that `callback(stage, done, total)` moves; nothing is drawn when quiet or not on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=quiet or not sys.stderr.isatty()
    ) as bar:
        tasks: dict[str, int] = {}

        def callback(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = int(bar.add_task(stage, total=total))
            bar.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield callback
