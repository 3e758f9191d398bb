"""What every program shares: number options, and one place that turns errors into exit codes."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

import typer

from ninfer.errors import NInferError, OptionError

# Typer carries its own copy of click in some releases and uses the package in others; the classes that its
# commands raise are found here through the one that it exports.
_UsageError, _ClickException = cast(tuple[type[Exception], type[Exception]], typer.BadParameter.__mro__[1:3])


def program(**settings: Any) -> typer.Typer:
    """An application with plain help, no shell completion and ordinary tracebacks for our own defects."""
    return typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings
    )


def whole(flag: str, help: str, *more: str) -> Any:
    """An option that takes a decimal integer; its range is checked by the room that owns it. `more`: further
    spellings."""
    return typer.Option(flag, *more, parser=_whole, metavar="N", help=help)


def number(flag: str, help: str, metavar: str = "F") -> Any:
    """An option that takes a real number; its range is checked by the room that owns it."""
    return typer.Option(flag, parser=_number, metavar=metavar, help=help)


# Of programs that write an artifact.
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Encoding threads (default: the cores, at most 16).")
]
MaxFileBytes = Annotated[
    int, typer.Option("--max-file-bytes", min=1, help="Split the artifact into files of at most this size.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar, no summary.")]


def end_by_interrupt() -> None:
    """From here on a polite kill ends like Ctrl-C, so that temporary files are removed."""

    def interrupted(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)


@contextlib.contextmanager
def flags(**names: str) -> Iterator[None]:
    """Inside, an error about a Python option's value becomes one about its flag; `names` are those flags that
    are called otherwise than their option."""
    try:
        yield
    except OptionError as error:
        name, must, rest = str(error).partition(" must be ")
        if not must or not name.isidentifier():
            raise
        flag = names.get(name, "--" + name.replace("_", "-"))
        raise OptionError(f"{flag}{must}{rest}") from None


_INTERRUPTED = 130
"""What typer returns instead of letting a KeyboardInterrupt through."""


def run(
    app: typer.Typer,
    name: str,
    argv: Sequence[str] | None,
    prefix: str | None = None,
    later: Mapping[str, str] | None = None,
    misuse: int = 1,
) -> int:
    """Run an application's only command; the exit code is 0 for success and help, 1 for an expected failure,
    `misuse` for wrong options.

    Option errors are followed by the full usage on stderr; every other expected error is one sentence.
    `later` names options that are known but not built yet: option -> what they wait for.
    """
    _prepare_streams()
    _spin_briefly()
    prefix = prefix or name
    command = typer.main.get_command(app)
    command.context_settings["help_option_names"] = ["--help", "-h"]
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _refuse_later(command, arguments, later or {})
        result = command.main(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        if result == _INTERRUPTED:
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except _ClickException as error:
        print(f"{prefix}: {_message(error)}", file=sys.stderr)
        if isinstance(error, _UsageError):
            with command.make_context(name, [], resilient_parsing=True) as context:
                print(command.get_help(context), file=sys.stderr)
        return misuse
    except NInferError as error:
        print(f"{prefix}: {printable(str(error))}", file=sys.stderr)
        return misuse if isinstance(error, OptionError) else 1
    except (KeyboardInterrupt, typer.Abort):
        print(f"\n{prefix}: interrupted", file=sys.stderr)
        return 1
    except OSError as error:
        # A reader of our output that went away (as in `| head`) needs no message.
        if not isinstance(error, BrokenPipeError):
            place = error.filename or "input or output failed"
            print(f"{prefix}: {printable(str(place))}: {error.strerror or error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            sys.stdout = None  # type: ignore[assignment]  # or it would fail once more at exit
        return 1
    finally:
        if argv is None:
            # The process ends now and its exit code is known: a late Ctrl-C must not change that.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def printable(text: str) -> str:
    """`text` on one line, its control characters escaped: it may come from a file."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _spin_briefly() -> None:
    """Let idle threads of the OpenMP runtime sleep after 10 us (GNU's default: milliseconds).

    Read when PyTorch is loaded. Costs nothing that can be measured on an idle machine; beside a busy program
    prefill is a quarter to a half faster (docs/performance.md).
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


def _whole(value: object) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise typer.BadParameter(f"{text!r:.80} is not a whole number")
    return int(text)


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise typer.BadParameter(f"{str(value)!r:.80} is not a number") from None


def _prepare_streams() -> None:
    """Closed streams become the null device; characters that a stream can't hold are replaced."""
    for name, mode, errors in (
        ("stdin", "r", "replace"),
        ("stdout", "w", "backslashreplace"),
        ("stderr", "w", "backslashreplace"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _message(error: Any) -> str:
    unknown = getattr(error, "option_name", None)
    if unknown is not None and type(error).__name__ == "NoSuchOption":
        return f"unknown argument: {unknown}"
    if type(error).__name__ == "BadOptionUsage" and "argument" in error.format_message():
        return f"{unknown} needs a value"
    return error.format_message().rstrip(".")


def _refuse_later(command: Any, arguments: Sequence[str], later: Mapping[str, str]) -> None:
    """Refuse options of later work, wherever they stand as options and not as another option's value."""
    valued = {
        name
        for parameter in command.params
        if not getattr(parameter, "is_flag", False)
        for name in parameter.opts
    }
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        option = argument.partition("=")[0]
        if option in later:
            raise OptionError(
                f"{option} is not available in this version: it waits for {later[option]}, later work"
            )
        position += 2 if argument.startswith("-") and argument in valued else 1
