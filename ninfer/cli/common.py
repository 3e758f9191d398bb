"""What every program shares: one place that turns errors into exit codes."""

import sys
from collections.abc import Sequence
from typing import Any

import typer

from ninfer.errors import NInferError

# Typer carries its own copy of click in some releases and uses the package in others; the classes that its
# commands raise are found here through the one that it exports.
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]


def program(**settings: Any) -> typer.Typer:
    """An application with plain help, no shell completion and ordinary tracebacks for our own defects."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def run(app: typer.Typer, name: str, argv: Sequence[str] | None, prefix: str | None = None) -> int:
    """Run an application's only command; the exit code is 0 for success and help, 1 for an expected failure.

    Option errors are followed by the full usage on stderr; every other expected error is one sentence.
    """
    prefix = prefix or name
    command = typer.main.get_command(app)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        result = command.main(args=arguments, prog_name=name, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except _ClickException as error:
        print(f"{prefix}: {_message(error)}", file=sys.stderr)
        if isinstance(error, _UsageError):
            with command.make_context(name, [], resilient_parsing=True) as context:
                print(command.get_help(context), file=sys.stderr)
        return 1
    except NInferError as error:
        print(f"{prefix}: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        print(f"\n{prefix}: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output went away (as in `| head`): nothing is left to say to it, at exit either.
        sys.stdout = None  # type: ignore[assignment]
        return 1


def _message(error: Any) -> str:
    unknown = getattr(error, "option_name", None)
    if unknown is not None and type(error).__name__ == "NoSuchOption":
        return f"unknown argument: {unknown}"
    return error.format_message().rstrip(".")
