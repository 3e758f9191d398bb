"""Retrieval, story, translation and tool tasks: seeds, checks, splits, sizes and depths."""

import json
import re

import pytest

from bench.tasks import orvali, retrieval, story, tools, translation
from bench.tasks.retrieval import KV_SIZES, estimated_tokens, kv_at
from bench.tasks.splits import in_split, part
from bench.tasks.task import CATEGORIES, Reply, Split, Task, reply_of, rng_for

GENERATORS = {
    name: (category, generator)
    for category, module in (
        ("retrieval", retrieval),
        ("story", story),
        ("translation", translation),
        ("tools", tools),
    )
    for name, generator in module.GENERATORS.items()
}
NAMES = sorted(GENERATORS)
SPLITS: tuple[Split, Split] = ("train", "heldout")


def draw(name: str, index: int, split: Split = "heldout") -> Task:
    return GENERATORS[name][1](rng_for(name, split, index), split)


def shown(task: Task) -> str:
    return json.dumps([task.messages, task.answer, task.tools, task.thinking, task.max_new])


def count(name: str) -> int:
    return 12 if name == "kv8192" else 60


def test_the_names_of_the_benchmark():
    assert set(NAMES) == {
        *("kv512", "kv2048", "kv8192", "kv_first", "kv_many", "needle", "story", "story_long"),
        *("to_orvali", "to_english", "glossary", "tool_call", "tool_result", "tool_thinking"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides(name: str):
    first = [shown(draw(name, index)) for index in range(8)]
    assert first == [shown(draw(name, index)) for index in range(8)]
    assert len(set(first)) == 8
    assert not set(first) & {shown(draw(name, index, "train")) for index in range(8)}


@pytest.mark.parametrize("name", NAMES)
def test_messages_and_answers_have_the_contract_s_form(name: str):
    for index in range(count(name)):
        task = draw(name, index, SPLITS[index % 2])
        assert (task.name, task.category) == (name, GENERATORS[name][0])
        assert task.category in CATEGORIES
        assert task.messages[-1]["role"] == ("tool" if name == "tool_result" else "user")
        assert bool(task.tools) == (task.category == "tools")
        assert task.thinking == (name == "tool_thinking") == ("reasoning_content" in task.answer)
        texts = [message["content"] for message in task.messages] + [task.answer["content"]]
        assert all(text.isascii() and text == text.strip() and "  " not in text for text in texts)
        assert not any(re.search(r"[{}]", text) for text in texts if not text.startswith("{"))
        assert texts[-1] or task.answer["tool_calls"]
        assert shown(task)  # JSON


@pytest.mark.parametrize("name", NAMES)
def test_a_check_accepts_its_own_answer_only(name: str):
    tasks = [draw(name, index, SPLITS[index % 2]) for index in range(count(name))]
    for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        own = reply_of(task.answer)
        assert task.check(own)
        assert not task.check(Reply(""))
        assert not task.check(Reply("", own.reasoning))
        assert not task.check(Reply(own.content, own.reasoning, (*own.tool_calls, ("get_weather", {}))))
        if own.tool_calls:
            assert not task.check(Reply("Yes.", own.reasoning, own.tool_calls))
            assert not task.check(Reply(own.content, own.reasoning, own.tool_calls[1:]))
        else:
            for length in (1, len(own.content) // 3, 2 * len(own.content) // 3):
                assert not task.check(Reply(own.content[:length], own.reasoning))
        if other.answer != task.answer and not _refused(task, other):
            assert not task.check(reply_of(other.answer)), (task.answer, other.answer)


def _refused(*tasks: Task) -> bool:
    """Whether both answers are refusals or reports of errors, of which there are few."""
    fixed = (*tools.REFUSALS, *(f"That did not work: {error}." for error in tools.ERRORS))
    return all(task.answer["content"] in fixed for task in tasks)


@pytest.mark.parametrize("name", ["to_orvali", "to_english", "glossary", "story", "tool_result"])
def test_answers_fit_into_their_room(name: str):
    assert all(len(task.answer["content"]) < 2 * task.max_new for task in (draw(name, i) for i in range(60)))


# Retrieval


def asked_line(task: Task) -> tuple[int, int]:
    """Index of the answer's line, and number of lines, of a task with one question."""
    lines = re.findall(r"^([a-z-]+\d*): (.+)$", task.messages[-1]["content"], re.MULTILINE)
    keys = [key for key, _ in lines]
    assert len(set(keys)) == len(keys) == len({value for _, value in lines})
    (index,) = [index for index, (_, value) in enumerate(lines) if value == task.answer["content"]]
    question = re.sub(r"^[a-z-]+\d*: .+$", "", task.messages[-1]["content"], flags=re.MULTILINE)
    assert re.search(rf"(?<![\w-]){keys[index]}(?![\w-])", question)
    return index, len(lines)


@pytest.mark.parametrize("tokens", KV_SIZES)
def test_the_asked_depth_is_met(tokens: int):
    for depth in (0.0, 0.25, 0.5, 0.99, 1.0):
        index, lines = asked_line(kv_at(rng_for("depth", "heldout", 1), "heldout", tokens, depth))
        assert index == min(int(depth * lines), lines - 1)


def test_depths_are_uniform():
    depths = [(index + 0.5) / lines for index, lines in (asked_line(draw("kv512", i)) for i in range(600))]
    quarters = [sum(q <= 4 * depth < q + 1 for depth in depths) for q in range(4)]
    assert all(110 <= quarter <= 190 for quarter in quarters), quarters  # 150 expected, sd 10.6


@pytest.mark.parametrize("tokens", KV_SIZES)
def test_prompts_fill_their_claim_and_never_exceed_it(tokens: int):
    for index in range(10):
        text = "\n".join(message["content"] for message in draw(f"kv{tokens}", index).messages)
        assert 0.9 * tokens <= estimated_tokens(text) <= 0.98 * tokens
        digits = len(re.findall(r"[0-9]", text))
        assert digits + (len(text) - digits) / 3.3 <= tokens  # characters an English token


def test_a_counter_of_the_caller_decides_the_size():
    task = kv_at(rng_for("count", "train", 0), "train", 2048, 0.5, count=lambda text: float(len(text)))
    assert 0.9 * 2048 < len(task.messages[-1]["content"]) <= 2048


def test_several_questions_are_answered_in_turn():
    for index in range(40):
        task = draw("kv_many", index)
        turns = [message for message in task.messages if message["role"] != "system"]
        assert 3 <= len(turns) <= 7
        assert len(turns) % 2
        entries = re.findall(r"^([a-z-]+\d*): (.+)$", turns[0]["content"], re.MULTILINE)
        answers = [turn["content"] for turn in turns[1::2]] + [task.answer["content"]]
        for turn, answer in zip(turns[::2], answers, strict=True):
            asked = re.sub(r"^[a-z-]+\d*: .+$", "", turn["content"], flags=re.MULTILINE)
            found = [v for k, v in entries if re.search(rf"(?<![\w-]){k}(?![\w-])", asked)]
            assert found == [answer]


def test_a_needle_stands_in_its_document_once():
    for index in range(60):
        task = draw("needle", index)
        text = task.messages[-1]["content"]
        assert len(re.findall(rf"\b{task.answer['content']}\b", text)) == 1
        assert 250 <= estimated_tokens(text) <= 3000


@pytest.mark.parametrize("reply", ["4821.", " 4821 ", '"4821"'])
def test_a_value_may_be_dressed(reply: str):
    assert retrieval.value_check("4821")(Reply(reply))


@pytest.mark.parametrize("reply", ["482", "48210", "The value is 4821", "4821 4821", "1248"])
def test_a_value_must_stand_alone(reply: str):
    assert not retrieval.value_check("4821")(Reply(reply))


# Stories


@pytest.mark.parametrize(("name", "least", "most"), [("story", 45, 170), ("story_long", 190, 420)])
def test_stories_have_their_length(name: str, least: int, most: int):
    assert all(least <= len(draw(name, index).answer["content"].split()) <= most for index in range(200))


def test_a_story_must_keep_its_promises():
    filler = " ".join(f"Then Ada saw house number {number} with a kite." for number in range(8))
    check = story.story_check(["Ada", "kite", "LEMON-37"], "All was well.")
    right = f"{filler} It said LEMON-37. All was well."
    assert check(Reply(right))
    assert not check(Reply(right.replace("LEMON-37", "LEMON-38")))
    assert not check(Reply(right.replace("Ada", "Adam")))
    assert not check(Reply(right.replace("All was well.", "All was good.")))
    assert not check(Reply(right[:-1]))
    assert not check(Reply(right.replace("number 1 ", "number 2 ")))  # a sentence twice
    assert not check(Reply("Ada had a kite. It said LEMON-37. All was well."))  # too short
    assert not check(Reply(f"{filler} {'long ' * 400}. LEMON-37. All was well."))


def test_chapters_must_be_numbered_in_order():
    task = draw("story_long", 3)
    content = task.answer["content"]
    assert not task.check(Reply(content.replace("Chapter 2:", "Chapter 3:")))
    assert not task.check(Reply(content.replace("Chapter 3:", "Part 3:")))


# Translation


def test_each_sentence_determines_the_other():
    rng = rng_for("pairs", "train", 0)
    pairs = [orvali.sentence(rng) for _ in range(20_000)]
    forth, back = dict(pairs), {foreign: english for english, foreign in pairs}
    assert len(forth) == len(back) == len(set(pairs))


def test_the_dictionary_is_unambiguous():
    tables = (orvali.PRONOUNS, orvali.FUNCTION, orvali.POSSESSIVES, orvali.NUMERALS, orvali.PREPOSITIONS)
    tables += (orvali.TIMES, orvali.NOUNS, orvali.VERBS, orvali.INTRANSITIVE, orvali.ADJECTIVES)
    stems = [stem for table in tables for stem in table.values()]
    assert len(stems) == len(set(stems)) >= 280
    assert not any(stem.endswith((orvali.PLURAL, orvali.PAST)) for stem in stems)


def test_grammar_by_hand():
    """Sentences put together from the grammar's rules and the dictionary alone."""
    n, v, a, p = orvali.NOUNS, orvali.VERBS, orvali.ADJECTIVES, orvali.PREPOSITIONS
    wanted = {
        "The old king": f"{n['king']} {a['old']}",
        "two black": f"{orvali.NUMERALS['two']} ",
        "did not see": f"{orvali.FUNCTION['not']} {v['see:saw']}ta",
        "sees": v["see:saw"],
        "horses": f"{n['horse']}li",
        "in the garden": f"{n['garden']} {p['in']}",
        "women": f"{n['woman:women']}li",
        "brought": f"{v['bring:brought']}ta",
    }
    rng = rng_for("hand", "train", 0)
    seen = set()
    for _ in range(60_000):
        english, foreign = orvali.sentence(rng)
        for part_, stem in wanted.items():
            if re.search(rf"\b{part_}\b", english):
                seen.add(part_)
                assert stem.lower() in foreign.lower(), (english, foreign)
    assert seen == set(wanted)


def test_held_out_sentences_are_never_trained_on():
    def sentences(split: Split) -> set[str]:
        texts = [draw("to_english", index, split).answer["content"] for index in range(300)]
        return {sentence for text in texts for sentence in re.findall(r"[^.?]+[.?]", text)}

    train, held_out = ({sentence.strip() for sentence in sentences(split)} for split in SPLITS)
    assert all(in_split(sentence, "train") for sentence in train)
    assert all(in_split(sentence, "heldout") for sentence in held_out)


def test_a_glossary_translates_word_by_word():
    for index in range(60):
        task = draw("glossary", index)
        pairs = dict(
            pair
            for line in task.messages[-1]["content"].splitlines()
            for pair in re.findall(r"^(?:- )?([a-z]+)(?: = |: | means )([a-z]+)$", line)
        )
        assert 6 <= len(pairs) <= 12
        answer = task.answer["content"].split()
        other = {**pairs, **{new: old for old, new in pairs.items()}}
        assert " ".join(other[word] for word in answer) in task.messages[-1]["content"]


@pytest.mark.parametrize(
    ("reply", "right"), [("PONTUM  lo", True), ("Pontum lo.", True), ("Pontum lota", False)]
)
def test_case_and_the_last_mark_don_t_matter(reply: str, right: bool):
    assert translation.translation_check("Pontum lo.")(Reply(reply)) == right


# Tools


def declared(task: Task) -> dict[str, dict]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}


JSON_TYPES = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


@pytest.mark.parametrize("name", ["tool_call", "tool_thinking", "tool_result"])
def test_calls_fit_the_declarations(name: str):
    refused = twice = 0
    for index in range(400):
        task = draw(name, index)
        assert 1 <= len(task.tools) == len(declared(task)) <= 4
        message = next((m for m in task.messages if "tool_calls" in m), task.answer)
        calls = [call["function"] for call in message.get("tool_calls", [])]
        refused += not calls
        twice += len(calls) == 2
        for call in calls:
            schema = declared(task)[call["name"]]
            assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])
            for key, value in call["arguments"].items():
                form = schema["properties"][key]
                assert isinstance(value, JSON_TYPES[form["type"]])
                assert isinstance(value, bool) == (form["type"] == "boolean")
                assert value in form.get("enum", [value])
                if not isinstance(value, bool):
                    assert any(str(value) in m["content"] for m in task.messages if m["role"] == "user")
    assert refused == 0 if name == "tool_result" else 35 <= refused <= 90
    assert 30 <= twice <= 90


def test_arguments_are_compared_by_value():
    check = tools.calls_check([("f", {"a": 2, "b": "x", "c": True})])
    assert check(Reply("", tool_calls=(("f", {"c": True, "a": 2.0, "b": "x"}),)))
    for arguments in ({"a": 2, "b": "x"}, {"a": 2, "b": "x", "c": 1}, {"a": "2", "b": "x", "c": True}):
        assert not check(Reply("", tool_calls=(("f", arguments),)))
    assert not check(Reply("", tool_calls=(("g", {"a": 2, "b": "x", "c": True}),)))


def test_the_order_of_calls_is_free_and_their_number_is_not():
    one, two = ("f", {"a": 1}), ("g", {})
    check = tools.calls_check([one, two])
    assert check(Reply("", tool_calls=(two, one)))
    assert not check(Reply("", tool_calls=(one, one)))
    assert not check(Reply("", tool_calls=(one, two, two)))


def test_thoughts_must_name_the_function():
    task = next(task for task in (draw("tool_thinking", i) for i in range(20)) if "tool_calls" in task.answer)
    own = reply_of(task.answer)
    assert own.tool_calls[0][0] in own.reasoning
    assert not task.check(Reply("", "Let me think.", own.tool_calls))
    assert not task.check(Reply("", "", own.tool_calls))


def test_a_report_needs_whole_values():
    check = tools.report_check(["21", "Oslo"])
    assert check(Reply("In Oslo it is 21."))
    for reply in (
        "In Oslo it is 210.",
        "In Oslo it is 21.5.",
        "In Oslo it is 3.21.",
        "It is 21.",
        "Oslo: -21",
    ):
        assert not check(Reply(reply))


def test_held_out_values_are_never_trained_on():
    """Free values of one kind: cities, and the texts of messages and notes."""

    def values(split: Split, keys: tuple[str, ...]) -> set[str]:
        calls = [call for i in range(600) for call in reply_of(draw("tool_call", i, split).answer).tool_calls]
        return {value for _, arguments in calls for key, value in arguments.items() if key in keys}

    for keys in (("city", "town", "location"), ("text", "message", "body"), ("path", "file")):
        train, held_out = (values(split, keys) for split in SPLITS)
        assert len(train) > 10
        assert len(held_out) > 10
        assert not train & held_out


def test_parts_divide_a_list():
    values = [str(number) for number in range(50)]
    assert sorted(part(values, "train") + part(values, "heldout")) == sorted(values)
    assert len(part(values, "heldout")) == 6
