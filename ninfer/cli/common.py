"""What every program shares: one place that turns errors into exit codes."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
import typer.core

from ninfer.errors import NInferError, OptionError

# Typer carries its own copy of click in some releases and uses the package in others; the classes that its
# commands raise are found here through the one that it exports.
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]


def program(**settings: Any) -> typer.Typer:
    """An application with plain help, no shell completion and ordinary tracebacks for our own defects."""
    return typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings
    )


def run(
    app: typer.Typer,
    name: str,
    argv: Sequence[str] | None,
    prefix: str | None = None,
    later: Mapping[str, tuple[str, bool]] | None = None,
) -> int:
    """Run an application's only command; the exit code is 0 for success and help, 1 for an expected failure.

    Option errors are followed by the full usage on stderr; every other expected error is one sentence.
    `later` names options that are known but not built yet: option -> (what they wait for, takes a value).
    """
    prefix = prefix or name
    command = typer.main.get_command(app)
    command.context_settings["help_option_names"] = ["--help", "-h"]
    for option, (reason, takes_value) in (later or {}).items():
        command.params.append(_refused(option, reason, takes_value))
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
    if type(error).__name__ == "BadOptionUsage" and "argument" in error.format_message():
        return f"{unknown} needs a value"
    return error.format_message().rstrip(".")


def _refused(option: str, reason: str, takes_value: bool) -> Any:
    def refuse(_context: Any, _parameter: Any, value: Any) -> None:
        if value:
            raise OptionError(
                f"{option} is not available in this version: it needs {reason}, which is later work"
            )

    return typer.core.TyperOption(
        param_decls=[option], is_flag=not takes_value, hidden=True, expose_value=False, callback=refuse
    )
