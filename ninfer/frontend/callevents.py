"""What a parser of tool calls says about an answer."""

from dataclasses import dataclass
from typing import Literal

from ninfer.frontend.calls import Failure


@dataclass(frozen=True)
class ContentText:
    """New text that is no call's."""

    text: str


@dataclass(frozen=True)
class CallBegan:
    """A call whose name is known and declared; calls count from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments: joined, the pieces are one JSON object."""

    index: int
    json_piece: str


@dataclass(frozen=True)
class CallEnded:
    """The call is complete; `arguments_json` is all its pieces joined."""

    index: int
    name: str
    arguments_json: str


CallEvent = ContentText | CallBegan | CallArguments | CallEnded


@dataclass(frozen=True)
class CallReport:
    """What became of an answer's calls; `fallback` says why some text that could be a call's is content."""

    marker_seen: bool = False
    structured_calls: int = 0
    empty_arguments_omitted: int = 0
    schema_mismatches: int = 0
    fallback: Failure | Literal["none"] = "none"
