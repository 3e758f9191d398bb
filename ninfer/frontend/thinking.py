"""The thinking block: its markers, and the sentence that closes it early."""

from ninfer.frontend.provenance import TemplateText, spans_of

OPEN = "<think>"
CLOSE = "</think>"

# Committed unsampled when the thinking budget is used up. The space behind the second newline is intended.
EARLY_CLOSE = TemplateText.literal(
    "\n\n Considering the limited time by the user, I have to give the solution based on the thinking"
    " directly now.\n</think>\n\n"
)


def ends_inside_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends right inside an open block: the template's `<think>`, then only space.

    A marker that came in as data does not count.
    """
    at = prompt.rfind(OPEN)
    if at < 0 or prompt[at + len(OPEN) :].strip():
        return False
    return any(begin <= at and at + len(OPEN) <= end for begin, end in spans_of(prompt))
