"""Where the messages of a rendered prompt begin: the places at which a later prompt may branch off.

A message begins with a control token that opens a header, `<|im_start|>` or `<|start_header_id|>`; the role
follows. Only a template can write control tokens (see `provenance`), so no message's text adds a boundary.
Whatever a template renders under one header is one message: grouped tool results, say, or tools together with
the system text. A prompt without such tokens has no marks at all: they only say where a kept state is likely
to be of use, and nothing but equality of tokens makes it usable.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ninfer.frontend.provenance import spans_of
from ninfer.frontend.tokenizer import Control

_OPENERS = ("<|im_start|>", "<|start_header_id|>")
# The control tokens between an answer's beginning and its first generated token.
_OF_ANSWER = (*_OPENERS, "<|end_header_id|>", "<think>", "</think>")
_LEADING = ("system", "developer")
_NOT_ANSWERING = (*_LEADING, "user", "tool")
_ROLE = re.compile(r"\s*(\w*)")


@dataclass(frozen=True, slots=True)
class Marks:
    """Token offsets in a prompt; see `Prompt`."""

    boundaries: tuple[int, ...] = ()
    preamble: int | None = None
    opener: int | None = None


def find_marks(text: str, controls: Sequence[Control], *, generation_prompt: bool) -> Marks:
    """The marks of a rendered prompt, whose control tokens are `controls` in order.

    The opener is the last boundary if a generation prompt was asked for and nothing follows but what opens
    an answer: the template's own text, without control tokens but those of a header and a thinking block.
    """
    headers = [control for control in controls if control.content in _OPENERS]
    # A beginning-of-text token may be the same token, as SmolLM2's is; then a header follows at once.
    headers = [
        header
        for number, header in enumerate(headers, 1)
        if number == len(headers) or headers[number].offset > header.offset + 1
    ]
    if not headers:
        return Marks()
    plain = str.__str__(text)
    leading = sum(1 for _ in takewhile(lambda header: _role(plain, header) in _LEADING, headers))
    last = headers[-1]
    answers = (
        generation_prompt
        and _role(plain, last) not in _NOT_ANSWERING
        and all(control.content in _OF_ANSWER for control in controls if control.begin >= last.begin)
        and any(begin <= last.begin and end == len(plain) for begin, end in spans_of(text)[-1:])
    )
    return Marks(
        tuple(header.offset for header in headers),
        headers[leading].offset if 0 < leading < len(headers) else None,
        last.offset if answers else None,
    )


def _role(text: str, header: Control) -> str:
    match = _ROLE.match(text, header.end)
    return match[1] if match else ""
