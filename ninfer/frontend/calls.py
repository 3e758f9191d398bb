"""Tool calls in an answer: where the text of one begins and ends while it is being written.

A call is `<tool_call>` ... `</tool_call>`. Parameter values are free text and may spell markers themselves:
the closing marker counts only outside of parameters, whose markers nest. So a call that leaves a parameter
open never ends, and what follows stays with it: only a parser that sees the whole answer can say what it was.
"""

from ninfer.frontend.stops import Scanner

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
SPACE = " \t\r\n"
_PARAMETER_OPEN = "<parameter="
_PARAMETER_CLOSE = "</parameter>"


class CallRegion:
    """The text of one call after its opening marker, followed in time linear in the text."""

    def __init__(self) -> None:
        self._scanner = Scanner((CLOSE, _PARAMETER_OPEN, _PARAMETER_CLOSE))
        self._depth = 0
        self.closed = False
        """Has the closing marker come?"""

    def feed(self, piece: str) -> int:
        """How many characters of `piece` belong to the call: all, until it and the space after it end."""
        cursor = 0
        while not self.closed:
            pending = self._scanner.pending
            match = self._scanner.feed(piece[cursor:])
            if match is None:
                return len(piece)
            cursor += match.end - pending
            self._scanner.restart()
            if match.pattern == 0:
                self.closed = self._depth == 0
            else:
                self._depth = self._depth + 1 if match.pattern == 1 else max(0, self._depth - 1)
        return len(piece) - len(piece[cursor:].lstrip(SPACE))
