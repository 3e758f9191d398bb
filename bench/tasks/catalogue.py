"""The functions that tool tasks declare: parameters, requests in natural words, and results.

A request's slots are its parameters; an optional one stands for a whole clause or for nothing. `facts` are
what the result adds; `text` is the result as plain text, `says` the sentence that reports it, `shows` what of
both a report must contain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.tasks.draws import (
    CITY,
    CLOCK,
    CURRENCIES,
    DATE,
    FOLDER,
    LANGUAGES,
    NOUNS,
    PATH,
    PERSON,
    ROOMS,
    SENTENCE,
    STEMS,
    TITLE,
    Draw,
    amount,
    any_of,
    cents,
    code,
    command_line,
    errand,
    file_name,
    fresh,
    halves,
    page,
    pool,
    symbol,
    title,
    town,
    whole,
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """names: by variant of the function. said: words for values that aren't written as they are. clauses:
    forms in which a request mentions an optional parameter (slot `{}`); none for a required one."""

    names: tuple[str, ...]
    schema: dict[str, Any]
    draw: Draw
    clauses: tuple[str, ...] = ()
    said: dict[Any, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Function:
    """names: by variant. Functions of one group answer alike requests and are never declared together."""

    group: str
    names: tuple[str, ...]
    description: str
    parameters: dict[str, Parameter]
    asks: tuple[str, ...]
    facts: dict[str, Draw]
    text: str
    says: str
    shows: tuple[str, ...]


def text(description: str, choices: tuple[str, ...] = ()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "description": description}
    return {**schema, "enum": list(choices)} if choices else schema


def number(description: str, kind: str = "integer") -> dict[str, Any]:
    return {"type": kind, "description": description}


def switch(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}


FUNCTIONS: tuple[Function, ...] = (
    Function(
        "weather",
        ("get_weather", "current_weather", "weather_report"),
        "Get the current weather of a city.",
        {
            "city": Parameter(("city", "location", "place"), text("Name of the city"), CITY),
            "unit": Parameter(
                ("unit",),
                text("Unit of the temperature", ("celsius", "fahrenheit")),
                any_of("celsius", "fahrenheit"),
                (" in {}", " in degrees {}"),
            ),
        },
        (
            "What is the weather like in {city}{unit}?",
            "How warm is it in {city} now{unit}?",
            "Tell me the temperature in {city}{unit}.",
        ),
        {"temperature": whole(-20, 40), "sky": any_of("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")},
        "{temperature} degrees, {sky}",
        "It is {temperature} degrees and {sky} in {city}.",
        ("temperature", "sky", "city"),
    ),
    Function(
        "currency",
        ("convert_currency", "exchange_money"),
        "Convert an amount of money from one currency to another.",
        {
            "amount": Parameter(("amount",), number("Amount to convert", "number"), amount),
            "from": Parameter(("from", "source"), text("Currency code to convert from"), any_of(*CURRENCIES)),
            "to": Parameter(("to", "target"), text("Currency code to convert to"), any_of(*CURRENCIES)),
        },
        (
            "How much is {amount} {from} in {to}?",
            "Convert {amount} {from} to {to}.",
            "What do I get in {to} for {amount} {from}?",
        ),
        {"result": cents},
        "{result} {to}",
        "{amount} {from} is {result} {to}.",
        ("result", "to"),
    ),
    Function(
        "timer",
        ("set_timer", "start_timer"),
        "Start a countdown timer.",
        {
            "minutes": Parameter(("minutes", "duration"), number("Length in minutes"), whole(1, 120)),
            "label": Parameter(
                ("label", "name"), text("What the timer is for"), TITLE, (" for the {}", " named {}")
            ),
        },
        ("Set a timer of {minutes} minutes{label}.", "Start a {minutes} minute timer{label}."),
        {"ends": CLOCK},
        "timer runs until {ends}",
        "The timer of {minutes} minutes ends at {ends}.",
        ("minutes", "ends"),
    ),
    Function(
        "search",
        ("search_files", "find_files"),
        "Find files by name in a folder.",
        {
            "pattern": Parameter(("pattern", "query"), text("Name or part of it"), fresh(file_name)),
            "folder": Parameter(("folder", "directory"), text("Where to search"), FOLDER),
            "recursive": Parameter(
                ("recursive",),
                switch("Also search folders inside"),
                any_of(True, False),
                (" {}",),
                {True: "with subfolders", False: "without subfolders"},
            ),
        },
        (
            "Search {folder} for {pattern}{recursive}.",
            "Find all files named {pattern} in {folder}{recursive}.",
        ),
        {"matches": whole(0, 300)},
        "{matches} matches",
        "I found {matches} files that match {pattern}.",
        ("matches", "pattern"),
    ),
    Function(
        "message",
        ("send_message", "send_text"),
        "Send a text message to a person.",
        {
            "to": Parameter(("to", "recipient"), text("Name of the person"), PERSON),
            "text": Parameter(("text", "message"), text("What to send"), SENTENCE),
        },
        ('Send {to} the message "{text}".', 'Write to {to}: "{text}".', 'Tell {to} "{text}" in a message.'),
        {"id": whole(1000, 99_999)},
        "sent as number {id}",
        "The message to {to} was sent with the number {id}.",
        ("to", "id"),
    ),
    Function(
        "event",
        ("create_event", "add_appointment"),
        "Put an event into the calendar.",
        {
            "title": Parameter(("title",), text("Title of the event"), TITLE),
            "date": Parameter(("date", "day"), text("Date as YYYY-MM-DD"), DATE),
            "time": Parameter(("time", "start"), text("Time as HH:MM"), CLOCK),
        },
        (
            "Put the {title} into my calendar on {date} at {time}.",
            "I have a {title} on {date} at {time}; add it to the calendar.",
            "Create an event called {title} for {date}, {time}.",
        ),
        {"id": whole(100, 9999)},
        "created event {id}",
        "The {title} is in the calendar as event {id}.",
        ("title", "id"),
    ),
    Function(
        "file",
        ("read_file", "open_file"),
        "Read a text file.",
        {
            "path": Parameter(("path", "file"), text("Path of the file"), PATH),
            "lines": Parameter(
                ("lines", "limit"),
                number("Number of lines to read"),
                whole(2, 200),
                (", only {} lines", ", {} lines"),
            ),
        },
        ("Read the file {path}{lines}.", "Show me {path}{lines}.", "What is in {path}{lines}?"),
        {"content": SENTENCE},
        "{content}",
        'The file {path} says "{content}".',
        ("path", "content"),
    ),
    Function(
        "shell",
        ("run_command", "execute"),
        "Run a shell command.",
        {"command": Parameter(("command", "line"), text("Command line"), fresh(command_line))},
        ("Run `{command}`.", "Execute the command `{command}`.", "Please run this: `{command}`"),
        {"exit_code": whole(0, 127), "seconds": whole(1, 90)},
        "exit code {exit_code} after {seconds} seconds",
        "The command ended with exit code {exit_code} after {seconds} seconds.",
        ("exit_code", "seconds"),
    ),
    Function(
        "word",
        ("lookup_word", "define_word"),
        "Look up the meaning of a word in a dictionary.",
        {
            "word": Parameter(("word", "term"), text("The word"), pool(NOUNS)),
            "language": Parameter(
                ("language",), text("Language of the dictionary", LANGUAGES), any_of(*LANGUAGES), (" in {}",)
            ),
        },
        ('What does "{word}" mean{language}?', 'Look up the word "{word}"{language}.'),
        {"meaning": TITLE},
        "{word}: {meaning}",
        'The word "{word}" means "{meaning}".',
        ("word", "meaning"),
    ),
    Function(
        "music",
        ("play_music", "play_artist"),
        "Play music of an artist.",
        {
            "artist": Parameter(
                ("artist", "band"), text("Name of the artist"), fresh(lambda rng: "The " + title(rng))
            ),
            "volume": Parameter(
                ("volume",), number("Loudness from 0 to 100"), whole(5, 100), (" at volume {}",)
            ),
            "shuffle": Parameter(
                ("shuffle",), switch("Mix the order"), any_of(True), (" in {}",), {True: "random order"}
            ),
        },
        ("Play music by {artist}{volume}{shuffle}.", "I want to hear {artist}{volume}{shuffle}."),
        {"track": TITLE},
        "now playing: {track}",
        'Now "{track}" by {artist} is playing.',
        ("track", "artist"),
    ),
    Function(
        "light",
        ("set_light", "switch_light"),
        "Turn the light of a room on or off.",
        {
            "room": Parameter(("room",), text("Name of the room"), pool(ROOMS)),
            "on": Parameter(
                ("on", "state"),
                switch("true for on, false for off"),
                any_of(True, False),
                (),
                {True: "on", False: "off"},
            ),
        },
        ("Turn {on} the light in the {room}.", "Switch the {room} light {on}."),
        {"watts": whole(0, 90)},
        "the lamp takes {watts} watts",
        "The light in the {room} is {on} and takes {watts} watts.",
        ("room", "on", "watts"),
    ),
    Function(
        "heating",
        ("set_heating", "set_temperature"),
        "Set the heating of a room.",
        {
            "room": Parameter(("room", "zone"), text("Name of the room"), pool(ROOMS)),
            "degrees": Parameter(("degrees", "value"), number("Degrees Celsius", "number"), halves),
        },
        ("Heat the {room} to {degrees} degrees.", "Set the {room} to {degrees} degrees."),
        {"minutes": whole(2, 90)},
        "reached in {minutes} minutes",
        "The {room} will have {degrees} degrees in {minutes} minutes.",
        ("room", "degrees", "minutes"),
    ),
    Function(
        "clock",
        ("get_time", "local_time"),
        "Get the local time of a city.",
        {"city": Parameter(("city", "place"), text("Name of the city"), CITY)},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
        {"time": CLOCK},
        "{time}",
        "It is {time} in {city}.",
        ("time", "city"),
    ),
    Function(
        "table",
        ("book_table", "reserve_table"),
        "Reserve a table in a restaurant.",
        {
            "restaurant": Parameter(("restaurant",), text("Name"), fresh(lambda rng: title(rng).title())),
            "people": Parameter(("people", "guests"), number("Number of guests"), whole(1, 14)),
            "time": Parameter(("time",), text("Time as HH:MM"), CLOCK),
        },
        (
            "Book a table for {people} at {restaurant} at {time}.",
            "Reserve a table at {restaurant} for {people} people, {time}.",
        ),
        {"table": whole(1, 60)},
        "table {table} is reserved",
        "Table {table} at {restaurant} is reserved for {time}.",
        ("table", "restaurant", "time"),
    ),
    Function(
        "stock",
        ("stock_price", "get_quote"),
        "Get the current price of a share.",
        {"symbol": Parameter(("symbol", "ticker"), text("Symbol of the share"), fresh(symbol))},
        (
            "What is the price of {symbol}?",
            "How does the share {symbol} stand?",
            "Get me a quote for {symbol}.",
        ),
        {"price": cents},
        "{price}",
        "{symbol} stands at {price}.",
        ("symbol", "price"),
    ),
    Function(
        "task",
        ("add_task", "create_todo"),
        "Add an entry to the to-do list.",
        {
            "task": Parameter(
                ("task", "title"),
                text("What is to be done"),
                fresh(errand),
            ),
            "priority": Parameter(
                ("priority",),
                text("How urgent", ("low", "medium", "high")),
                any_of("low", "medium", "high"),
                (" with {} priority", " ({} priority)"),
            ),
        },
        (
            'Add "{task}" to my to-do list{priority}.',
            "Remind me to {task}{priority}.",
            "New task: {task}{priority}.",
        ),
        {"open": whole(1, 60)},
        "{open} open tasks",
        'I added "{task}"; you now have {open} open tasks.',
        ("task", "open"),
    ),
    Function(
        "distance",
        ("get_distance", "measure_route"),
        "Distance between two cities by road.",
        {
            "origin": Parameter(("origin", "start"), text("City to start from"), CITY),
            "destination": Parameter(("destination", "end"), text("City to go to"), CITY),
        },
        (
            "How far is it from {origin} to {destination}?",
            "Give me the distance between {origin} and {destination}.",
        ),
        {"kilometres": whole(20, 4000)},
        "{kilometres} km",
        "It is {kilometres} kilometres from {origin} to {destination}.",
        ("kilometres", "origin", "destination"),
    ),
    Function(
        "translate",
        ("translate_text", "translate"),
        "Translate a text into another language.",
        {
            "text": Parameter(("text", "content"), text("Text to translate"), SENTENCE),
            "language": Parameter(
                ("language", "target"), text("Language to translate into", LANGUAGES), any_of(*LANGUAGES)
            ),
        },
        ('Translate "{text}" into {language}.', 'How do you say "{text}" in {language}?'),
        {"translation": fresh(lambda rng: f"{town(rng)} {town(rng)}".lower())},
        "{translation}",
        'In {language} it is "{translation}".',
        ("language", "translation"),
    ),
    Function(
        "flight",
        ("find_flight", "search_flights"),
        "Find a flight on a day.",
        {
            "from": Parameter(("from", "origin"), text("City of departure"), CITY),
            "to": Parameter(("to", "destination"), text("City of arrival"), CITY),
            "date": Parameter(("date",), text("Date as YYYY-MM-DD"), DATE),
        },
        (
            "Find a flight from {from} to {to} on {date}.",
            "I want to fly from {from} to {to} on {date}.",
            "Is there a flight to {to} from {from} on {date}?",
        ),
        {"flight": fresh(code), "departure": CLOCK},
        "{flight} at {departure}",
        "Flight {flight} to {to} leaves at {departure}.",
        ("flight", "to", "departure"),
    ),
    Function(
        "order",
        ("order_item", "buy_item"),
        "Order an article from the shop.",
        {
            "item": Parameter(("item", "article"), text("Name of the article"), TITLE),
            "quantity": Parameter(("quantity", "count"), number("How many"), whole(1, 60)),
            "express": Parameter(
                ("express",),
                switch("Fast delivery"),
                any_of(True, False),
                (", {}",),
                {True: "express", False: "not express"},
            ),
        },
        ("Order {quantity} pieces of the {item}{express}.", "I need the {item}, {quantity} pieces{express}."),
        {"price": cents},
        "{price} in all",
        "The order of {quantity} pieces of the {item} costs {price}.",
        ("quantity", "item", "price"),
    ),
    Function(
        "parcel",
        ("track_parcel", "parcel_status"),
        "Find out where a parcel is.",
        {"number": Parameter(("number", "code"), text("Number of the parcel"), fresh(code))},
        ("Where is my parcel {number}?", "Track the parcel {number}.", "Has parcel {number} arrived?"),
        {"status": any_of("on the way", "delivered", "in customs", "lost", "waiting"), "city": CITY},
        "{status}, {city}",
        "Parcel {number} is {status} in {city}.",
        ("number", "status", "city"),
    ),
    Function(
        "random",
        ("random_number", "roll"),
        "Draw a random whole number.",
        {
            "low": Parameter(("low", "min"), number("Smallest number"), whole(0, 50)),
            "high": Parameter(("high", "max"), number("Largest number"), whole(51, 1000)),
        },
        ("Give me a random number from {low} to {high}.", "Draw a number between {low} and {high}."),
        {"number": whole(0, 1000)},
        "{number}",
        "The number is {number}.",
        ("number",),
    ),
    Function(
        "note",
        ("write_note", "save_note"),
        "Save a note.",
        {
            "title": Parameter(("title", "heading"), text("Title of the note"), TITLE),
            "text": Parameter(("text", "body"), text("Text of the note"), SENTENCE),
        },
        ('Save a note called {title}: "{text}".', 'Note "{text}" under the title {title}.'),
        {"notes": whole(1, 500)},
        "{notes} notes",
        "The note {title} is saved; there are {notes} notes now.",
        ("title", "notes"),
    ),
    Function(
        "page",
        ("download_page", "fetch_url"),
        "Download a web page.",
        {"url": Parameter(("url", "address"), text("Address of the page"), fresh(page))},
        ("Download {url}.", "Fetch the page {url}.", "Get me {url}."),
        {"bytes": whole(300, 90_000)},
        "{bytes} bytes",
        "The page {url} has {bytes} bytes.",
        ("url", "bytes"),
    ),
    Function(
        "hotel",
        ("book_room", "reserve_room"),
        "Book a hotel room.",
        {
            "city": Parameter(("city", "town"), text("City"), CITY),
            "nights": Parameter(("nights",), number("Number of nights"), whole(1, 21)),
            "breakfast": Parameter(
                ("breakfast",),
                switch("Whether breakfast is wanted"),
                any_of(True, False),
                (" {}",),
                {True: "with breakfast", False: "without breakfast"},
            ),
        },
        (
            "Book a hotel room in {city} for {nights} nights{breakfast}.",
            "I need a room in {city} for {nights} nights{breakfast}.",
        ),
        {"room": whole(101, 999), "price": cents},
        "room {room}, {price} in all",
        "Room {room} in {city} is booked and costs {price}.",
        ("room", "city", "price"),
    ),
    Function(
        "sensor",
        ("read_sensor", "sensor_value"),
        "Read the value of a sensor.",
        {
            "sensor": Parameter(
                ("sensor", "id"),
                text("Name of the sensor"),
                fresh(lambda rng: f"{rng.choice(STEMS)}-{rng.randrange(1, 1000)}"),
            )
        },
        (
            "What does the sensor {sensor} show?",
            "Read sensor {sensor}.",
            "Give me the value of sensor {sensor}.",
        ),
        {"value": cents},
        "{value}",
        "Sensor {sensor} shows {value}.",
        ("sensor", "value"),
    ),
)
