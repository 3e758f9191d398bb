"""Short stories from a grammar of plots: free text whose names, objects and last words can be checked."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from bench.tasks.splits import in_split
from bench.tasks.storybook import (
    BEATS,
    CHAPTERS,
    CODE_SENTENCES,
    CODE_WORDS,
    ENDINGS,
    FRIENDS,
    HEROES,
    LAST,
    OBJECTS,
    PLACES,
    PLOTS,
    SHE,
)
from bench.tasks.task import Generator, Reply, Split
from bench.tasks.turns import Exchange, exchanges

# What the prompt asks for; the last part is a code word to mention or a sentence to end with.
ASKS = (
    "Write a short story about {hero} named {name} {place}. Use the word {word}. {extra}",
    "Tell me a short story about {hero} {place}. The main character is called {name}, and {an_word} plays "
    "a part. {extra}",
    "Please write a little story: {hero} with the name {name}, {place}, and {an_word}. {extra}",
    "I would like a short story with the word {word} in it. It is about {hero} named {name} {place}. {extra}",
    "Write a story about {name}, {hero} {place}. The story must contain the word {word}. {extra}",
)
LONG_ASKS = (
    "Write a story in three chapters about {hero} named {name} {place}. Use the word {word}. {extra}",
    "Tell a story with three numbered chapters about {name}, {hero} {place}. {An_word} plays a part. {extra}",
    "Please write a three-chapter story: {hero} with the name {name}, {place}, and {an_word}. {extra}",
)
ASK_CODE = ("Mention the code {code}.", "The code {code} must appear in it.", "Include the code {code}.")
ASK_ENDING = ('End with the sentence "{ending}"', 'The last sentence is "{ending}"')
TITLES = (
    ("The {Word}", "The Search", "The Way Home"),
    ("A Quiet Day", "The Long Road", "The {Word} Again"),
    ("{N} and the {Word}", "Help Arrives", "The End of the Day"),
    ("Morning", "Noon", "Evening"),
)

_SENTENCE = re.compile(r"(?<=[.!?])\"?\s+")
_HEADING = re.compile(r"^Chapter ([0-9]+): \S.*$", re.MULTILINE)


def sentences(text: str) -> list[str]:
    """The sentences of `text`, lower case, without quotes around them."""
    return [sentence.strip().strip('"').lower() for sentence in _SENTENCE.split(text.strip())]


def story_check(
    wanted: list[str], ending: str, least: int = 40, most: int = 400, chapters: int = 0
) -> Callable[[Reply], bool]:
    """Whether a reply is a story: every wanted word occurs, `ending` (if any) comes last, it has `least` to
    `most` words and `chapters` headings in order, ends with a full stop, and repeats no sentence."""

    def check(reply: Reply) -> bool:
        text = reply.content.strip()
        if reply.tool_calls or not text.endswith(".") or not least <= len(text.split()) <= most:
            return False
        if not text.endswith(ending):
            return False
        if not all(re.search(rf"(?<![\w-]){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in wanted):
            return False
        if [int(number) for number in _HEADING.findall(text)] != list(range(1, chapters + 1)):
            return False
        told = sentences(_HEADING.sub("", text))
        return len(set(told)) == len(told)

    return check


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


class _Cast:
    """Who and what a story is about, as the slots of its sentences."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        choice = rng.choice
        while True:
            name, word = choice(HEROES), choice(OBJECTS)
            if in_split(f"{name} {word}", split):
                break
        friend = choice(HEROES)
        while friend == name:
            friend = choice(HEROES)
        trait, trade, there, spot = choice(LAST["trait"]), choice(LAST["trade"]), *choice(PLACES)
        she, friend_she = name in SHE, friend in SHE
        kind, nature = choice(FRIENDS)
        self.name, self.word = name, word
        hero, an_word = f"{_article(trait)} {trade}", _article(word)
        self.asked = {
            "hero": hero,
            "name": name,
            "place": there,
            "word": word,
            "an_word": an_word,
            "An_word": an_word[0].upper() + an_word[1:],
        }
        self.slots = {
            "N": name,
            "F": friend,
            "o": word,
            "an_o": an_word,
            "hero": hero,
            "place": there,
            "spot": spot,
            "he": "she" if she else "he",
            "He": "She" if she else "He",
            "his": "her" if she else "his",
            "His": "Her" if she else "His",
            "him": "her" if she else "him",
            "kind": kind,
            "nature": nature,
            "fhe": "she" if friend_she else "he",
            "weather": choice(LAST["weather"]),
            "food": choice(LAST["food"]),
            "Word": word.capitalize(),
        }


def _told(
    rng: random.Random, cast: _Cast, beats: tuple[str, ...], plot: dict[str, tuple[str, ...]]
) -> list[str]:
    """One sentence group per beat; a beat is the plot's own or one that all plots share."""
    return [rng.choice(plot.get(beat) or BEATS[beat]).format_map(cast.slots) for beat in beats]


def _extra(rng: random.Random) -> tuple[str, str, str]:
    """The last part of the prompt, with the code word and the ending that it asks for (one is empty)."""
    if rng.random() < 0.5:
        code = f"{rng.choice(CODE_WORDS)}-{rng.randrange(10, 100)}"
        return rng.choice(ASK_CODE).format(code=code), code, ""
    ending = rng.choice(ENDINGS)
    return rng.choice(ASK_ENDING).format(ending=ending), "", ending


def _story(rng: random.Random, split: Split) -> Exchange:
    cast = _Cast(rng, split)
    extra, code, ending = _extra(rng)
    plot = rng.choice(PLOTS)
    beats = ["open", "start", "problem", "help", "act"]
    for beat, share, before in (("daily", 0.6, "start"), ("worry", 0.5, "help"), ("after", 0.5, None)):
        if rng.random() < share:
            beats.insert(beats.index(before) if before else len(beats), beat)
    told = _told(rng, cast, tuple(beats), plot)
    if code:
        told.append(rng.choice(CODE_SENTENCES).format_map({**cast.slots, "c": code}))
    told.append(ending or rng.choice(BEATS["end"]).format_map(cast.slots))
    question = rng.choice(ASKS).format(**cast.asked, extra=extra)
    wanted = [cast.name, cast.word, *([code] if code else [])]
    return question, " ".join(told), story_check(wanted, ending)


def _story_long(rng: random.Random, split: Split) -> Exchange:
    cast = _Cast(rng, split)
    extra, code, ending = _extra(rng)
    plot = rng.choice(PLOTS)
    titles = rng.choice(TITLES)
    parts: list[str] = []
    for number, (title, beats) in enumerate(zip(titles, CHAPTERS, strict=True), 1):
        told = _told(rng, cast, beats, plot)
        if number == 3:
            if code:
                told.append(rng.choice(CODE_SENTENCES).format_map({**cast.slots, "c": code}))
            told.append(ending or rng.choice(BEATS["end"]).format_map(cast.slots))
        parts.append(f"Chapter {number}: {title.format_map(cast.slots)}\n\n{' '.join(told)}")
    question = rng.choice(LONG_ASKS).format(**cast.asked, extra=extra)
    wanted = [cast.name, cast.word, *([code] if code else [])]
    return question, "\n\n".join(parts), story_check(wanted, ending, 120, 700, chapters=3)


GENERATORS: dict[str, Generator] = {
    "story": exchanges("story", "story", _story, 512),
    "story_long": exchanges("story_long", "story", _story_long, 1024),
}
