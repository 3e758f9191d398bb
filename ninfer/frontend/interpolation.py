"""`"...{}...".format(...)` and `"...%s..." % ...` of template text: the literal parts stay template text.

Forms whose parts depend on each other (nested fields, `*` widths) are formatted as a whole and become data.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from ninfer.frontend.provenance import TemplateText, concatenate

_CONVERSION = re.compile(r"%(?:\((?P<name>[^()]*)\))?(?P<form>[#0\- +]*\d*(?:\.\d+)?[diouxXeEfFgGcrsa%])")


def format_text(
    text: TemplateText, formatter: Formatter, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """`text.format(*args, **kwargs)` with fields looked up by `formatter`, which may refuse unsafe ones."""
    return concatenate(_formatted(text, formatter, args, kwargs))


def _formatted(
    text: TemplateText, formatter: Formatter, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    automatic = 0
    for literal, name, spec, conversion in formatter.parse(text.plain):
        yield TemplateText.literal(literal)
        if name is None:
            continue
        if name == "" or name[0] in ".[":
            name, automatic = f"{automatic}{name}", automatic + 1
        if not spec and not conversion:
            value, _ = formatter.get_field(name, args, kwargs)
            yield value if isinstance(value, str) else format(value)
        else:
            field = f"{{{name}{'!' + conversion if conversion else ''}:{spec or ''}}}"
            yield formatter.vformat(field, args, kwargs)


def percent_text(text: TemplateText, values: Any) -> str:
    """`text % values`."""
    expected = text.plain % values
    named: Any = values
    positional = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    cursor = 0
    for match in _CONVERSION.finditer(text.plain):
        pieces.append(text.cut(cursor, match.start()))
        cursor = match.end()
        if match["form"] == "%":
            pieces.append(TemplateText.literal("%"))
        else:
            value = next(positional, "") if match["name"] is None else named[match["name"]]
            kept = match["form"] == "s" and isinstance(value, str)
            pieces.append(value if kept else f"%{match['form']}" % (value,))
    pieces.append(text.cut(cursor, len(text)))
    result = concatenate(pieces)
    return result if result == expected else expected
