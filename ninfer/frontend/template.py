"""A chat template: sandboxed Jinja whose output knows which text the template itself wrote.

The environment behaves as the one Hugging Face templates are written for: immutable sandbox, trimmed blocks,
loop controls, `tojson` without HTML escaping, `raise_exception`, `strftime_now`, the `generation` block.
In addition every string literal of the template is compiled to a `TemplateText` (see `provenance`).
"""

import json
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib import resources
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from ninfer.errors import FrontendError
from ninfer.frontend.interpolation import format_text, percent_text
from ninfer.frontend.provenance import TemplateText, concatenate

MAX_TEMPLATE_BYTES = 16 << 20
MAINTAINED = ("qwen3_6", "qwen3_8")
_FILENAME = "<template>"  # the name Jinja compiles templates from strings under


def maintained_template(name: str) -> str:
    """The source of one of our own templates, for checkpoints that come without a usable one.

    Their behaviour is that of the Qwen3.6 and Qwen3.8 templates; the wording of the tool instructions and of
    the two effort sentences of 3.8 is ours. Raises FrontendError for an unknown name.
    """
    if name not in MAINTAINED:
        raise FrontendError(f"There is no chat template {name!r}; known are {', '.join(MAINTAINED)}.")
    return (resources.files("ninfer.frontend") / "templates" / f"{name}.jinja").read_text("utf-8")


class ChatTemplate:
    """A compiled template. Rendering is stateless and may be called from several threads."""

    def __init__(self, source: str) -> None:
        """Compile `source`. Raises FrontendError on a syntax error or an oversized text."""
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise FrontendError(
                f"The chat template has {size} bytes; at most {MAX_TEMPLATE_BYTES} are allowed."
            )
        try:
            self._template = _Environment().from_string(source)
        except TemplateSyntaxError as error:
            raise FrontendError(
                f"The chat template is not valid Jinja: {error.message} (line {error.lineno})."
            ) from error
        except (RecursionError, SyntaxError, ValueError) as error:
            raise FrontendError(f"The chat template cannot be compiled: {error}.") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt text, a `TemplateText` if any of it came from the template.

        Strings in `variables` are data, unless they are `TemplateText` themselves. Raises FrontendError with
        the template's own words when it refuses the conversation, else with the failing line.
        """
        try:
            return self._template.render(variables)
        except _Refusal as error:
            raise FrontendError(f"The chat template refused the conversation: {_words(error)}.") from error
        except UndefinedError as error:
            raise FrontendError(
                f"The chat template uses a value that this conversation lacks: {_words(error)}{_line(error)}."
            ) from error
        except Exception as error:  # whatever filters and methods raise at what they are given
            raise FrontendError(f"The chat template failed: {_words(error)}{_line(error)}.") from error


class _Refusal(TemplateError):
    """The template called `raise_exception`."""


def _words(error: BaseException) -> str:
    """What an error says, on one line and without its full stop."""
    words = " ".join(str(error).split()) or type(error).__name__
    return f"{words:.400}".removesuffix(".")


def _line(error: BaseException) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == _FILENAME]
    return f" (line {lines[-1]} of the template)" if lines else ""


class _LiteralGenerator(CodeGenerator):
    """Compiles string literals and template text to `TemplateText`, and `~` to a join that keeps spans."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _literal_source("".join(map(str, group)))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(_literal_source(value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(_literal_source(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _literal_source(text: str) -> str:
    return f"environment.literal({text!r})"


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it only prints it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _LiteralGenerator
    concat = staticmethod(concatenate)
    intercepted_binops = frozenset("%")

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._literals: dict[str, TemplateText] = {}
        self.filters.update(tojson=_tojson, join=_join, format=_format, safe=_safe)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def literal(self, text: str) -> TemplateText:
        """The shared `TemplateText` of a literal; called by compiled templates."""
        known = self._literals.get(text)
        if known is None:
            known = self._literals[text] = TemplateText.literal(text)
        return known

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if not isinstance(text, TemplateText) or value.__name__ != "format":
            return super().wrap_str_format(value)
        return lambda *args, **kwargs: format_text(text, SandboxedFormatter(self), args, kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return (
            _percent(left, right) if operator == "%" else super().call_binop(context, operator, left, right)
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _safe(value: Any) -> str:
    """No markup: nothing is escaped here anyway, and Markup would escape what it is joined with."""
    return value if isinstance(value, str) else str(value)


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    parts: list[Any] = []
    for item in value:
        if parts:
            parts.append(d)
        parts.append(item)
    return concatenate(parts)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    return _percent(value if isinstance(value, str) else str(value), kwargs or args)


def _percent(text: Any, values: Any) -> Any:
    return percent_text(text, values) if isinstance(text, TemplateText) else text % values


def _raise_exception(message: Any = "no reason given") -> None:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
