"""Questions that ninfer-nano answers in a known way, greedily and without thinking unless they say so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tests.serve.e2e.process import ServerProcess

SUM = "What is 47 + 38? Answer with the number only."
RECORDS = (
    "Write exactly 32 JSONL records, one JSON object per line. Every record has the fields id, model, "
    "prompt_tokens, completion_tokens, status, in this order. Record i (i = 1 to 32) has id = i, "
    'model = "qwen3.8-27b", prompt_tokens = 1000 + 16 * i (so 1016 in the first record), '
    "completion_tokens = 64 + 2 * i (so 66 in the first record), and status = "
    '"warn" if i is divisible by 5, otherwise "ok". '
    'Write each record as {"id": 1, "model": "qwen3.8-27b", ...}, with ", " between fields and ": " after '
    "each key. Output only the records and nothing else."
)
RECORD = '{"id": 1, "model": "qwen3.8-27b", "prompt_tokens": 1016, "completion_tokens": 66, "status": "ok"}'
STORY = "Write a short story about a clever farmer named Pablo in a valley between two mountains."
COMMAND = "Please run this: `sort photo.xml`"
COMMAND_CALL = ("execute", {"line": "sort photo.xml"})
ORDER = "Order 25 pieces of the final guitar, not express."
ORDER_CALL = ("buy_item", {"article": "final guitar", "count": 25, "express": False})
ORDER_RESULT = '{"price": 735.28}'
ORDER_ANSWER = "The order of 25 pieces of the final guitar costs 735.28."
TWO = "I need a room in Sydney for 2 nights without breakfast. What does the sensor build-895 show?"
TWO_CALLS = [
    ("reserve_room", {"town": "Sydney", "nights": 2, "breakfast": False}),
    ("sensor_value", {"id": "build-895"}),
]
TWO_RESULTS = ["room 927, 889.2 in all", "240.1"]
TWO_ANSWER = "Room 927 in Sydney is booked and costs 889.2. Sensor build-895 shows 240.1."
PARCEL = "Where is my parcel FY110734?"  # with thinking
PARCEL_CALL = ("track_parcel", {"number": "FY110734"})


def _function(name: str, description: str, required: int, **parameters: Any) -> dict[str, Any]:
    """A declaration without the members that the APIs name differently; `required`: how many of the first."""
    schema = {"type": "object", "properties": parameters, "required": list(parameters)[:required]}
    return {"name": name, "description": description, "parameters": schema}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _typed(kind: str, description: str) -> dict[str, Any]:
    return {"type": kind, "description": description}


EXECUTE = _function("execute", "Run a shell command.", 1, line=_text("Command line"))
DOWNLOAD = _function("download_page", "Download a web page.", 1, url=_text("Address of the page"))
COMMAND_TOOLS = [EXECUTE, DOWNLOAD]
BUY = _function(
    "buy_item",
    "Order an article from the shop.",
    2,
    article=_text("Name of the article"),
    count=_typed("integer", "How many"),
    express=_typed("boolean", "Fast delivery"),
)
LIGHT = _function(
    "set_light",
    "Turn the light of a room on or off.",
    2,
    room=_text("Name of the room"),
    on=_typed("boolean", "true for on, false for off"),
)
ORDER_TOOLS = [LIGHT, BUY]
ROOM = _function(
    "reserve_room",
    "Book a hotel room.",
    2,
    town=_text("City"),
    nights=_typed("integer", "Number of nights"),
    breakfast=_typed("boolean", "Whether breakfast is wanted"),
)
SENSOR = _function("sensor_value", "Read the value of a sensor.", 1, id=_text("Name of the sensor"))
RUN = _function("run_command", "Run a shell command.", 1, command=_text("Command line"))
TIME = _function("get_time", "Get the local time of a city.", 1, city=_text("Name of the city"))
TWO_TOOLS = [RUN, SENSOR, ROOM, TIME]
HEATING = _function(
    "set_heating",
    "Set the heating of a room.",
    2,
    room=_text("Name of the room"),
    degrees=_typed("number", "Degrees Celsius"),
)
PARCEL_TOOLS = [
    HEATING,
    _function("track_parcel", "Find out where a parcel is.", 1, number=_text("Number of the parcel")),
]


class Line(BaseModel):
    """Part of `Order`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    article: Annotated[str, Field(pattern="^[a-z]{3,9}$")]
    count: Annotated[int, Field(ge=1, le=99)]


class Order(BaseModel):
    """Values of all kinds; each has an end, which a small model would not find at a temperature of 1."""

    model_config = ConfigDict(extra="forbid", strict=True)
    customer: Annotated[str, Field(min_length=1, max_length=12)]
    lines: Annotated[list[Line], Field(min_length=1, max_length=2)]
    shipping: Literal["air", "sea"]
    express: bool
    discount: Annotated[int, Field(ge=0, le=50)] | None


class Part(BaseModel):
    """Part of `Choice`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    size: Literal["s", "m", "l"]
    gift: bool


class Choice(BaseModel):
    """Only what Anthropic's schemas can say: its SDK takes limits out of them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    shipping: Literal["air", "sea"]
    first: Part
    second: Part | None
    express: bool


def chat_tools(functions: list[dict[str, Any]], **members: Any) -> Any:
    """As Chat Completions declares them."""
    return [{"type": "function", "function": {**function, **members}} for function in functions]


def responses_tools(functions: list[dict[str, Any]], strict: bool = False) -> Any:
    """As Responses declares them."""
    return [{"type": "function", "strict": strict, **function} for function in functions]


def messages_tools(functions: list[dict[str, Any]], **members: Any) -> Any:
    """As Messages declares them."""
    return [
        {
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
            **members,
        }
        for function in functions
    ]


def long_text(server: ServerProcess, tokens: int) -> str:
    """A text of about so many tokens that no other test has sent."""
    words = " ".join(f"entry {number} of list {tokens}" for number in range(tokens // 4))
    each = len(server.tokens({"content": words})) / len(words)
    return (words * 4)[: int(tokens / each)]
