"""Structured, reasoning and code tasks: answers against independent solvers, splits, and the sandbox."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import re
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from bench.tasks import canonical_jsonl, code, generators, jsonl, reasoning, structured
from bench.tasks.code import unfenced
from bench.tasks.python_functions import TEMPLATES, draw_function
from bench.tasks.reasoning import pair_key
from bench.tasks.sandbox import Refused, load
from bench.tasks.splits import held_out
from bench.tasks.task import Reply, Split, Task, reply_of, rng_for

COUNT = 150


def drawn(name: str, split: Split = "train", count: int = COUNT) -> list[Task]:
    generate = generators()[name]
    return [generate(rng_for(name, split, index), split) for index in range(count)]


def asked(task: Task) -> str:
    return task.messages[-1]["content"]


def said(task: Task) -> str:
    return task.answer["content"]


@pytest.mark.parametrize("name", sorted({**structured.GENERATORS, **reasoning.GENERATORS, **code.GENERATORS}))
def test_one_character_less_at_either_end_is_wrong(name: str) -> None:
    for task in drawn(name, count=40):
        assert not task.check(Reply(said(task)[1:]))
        assert not task.check(Reply(said(task)[:-1]))


# --- jsonl


def test_canonical_answer_is_the_specified_one() -> None:
    task = canonical_jsonl()
    lines = [
        f'{{"id": {i}, "model": "qwen3.8-27b", "prompt_tokens": {1000 + 16 * i}, '
        f'"completion_tokens": {64 + 2 * i}, "status": "{"ok" if i % 5 else "warn"}"}}'
        for i in range(1, 33)
    ]
    assert said(task).split("\n") == lines
    assert task.check(Reply("\n".join(lines) + "\n"))
    for wrong in (
        lines[:-1],
        [*lines, lines[-1]],
        ["Here they are:", *lines],
        ["```", *lines, "```"],
        [line.replace(", ", ",") for line in lines],
        [*lines[:4], lines[4].replace("warn", "ok"), *lines[5:]],
        [lines[1], lines[0], *lines[2:]],
    ):
        assert not task.check(Reply("\n".join(wrong)))


def test_canonical_numbers_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first = jsonl._rule(random.Random(0))
    fields = ("base", "step", "base2", "step2", "period")
    clash = replace(jsonl.CANONICAL, **{field: getattr(first, field) for field in fields})
    monkeypatch.setattr(jsonl, "CANONICAL", clash)
    assert jsonl._rule(random.Random(0)).numbers != clash.numbers


def test_held_out_jsonl32_is_canonical_in_several_wordings() -> None:
    tasks = drawn("jsonl32", "heldout", 40)
    assert {said(task) for task in tasks} == {said(canonical_jsonl())}
    assert len({asked(task) for task in tasks}) > 20


def test_jsonl_lines_are_json_with_the_numbers_of_the_prompt() -> None:
    compact = 0
    for task in drawn("jsonl"):
        rows = [json.loads(line) for line in said(task).split("\n")]
        assert str(len(rows)) in re.findall(r"\d+", asked(task))
        assert len({tuple(row) for row in rows}) == 1
        assert ", ".join(rows[0]) in asked(task)
        rising = [key for key, value in rows[0].items() if isinstance(value, int)]
        for key in rising:
            assert len({b[key] - a[key] for a, b in itertools.pairwise(rows)}) == 1
        compact += '":"' in said(task)
    assert 0 < compact < COUNT / 2


# --- other structured output


def test_csv_has_the_asked_header_and_rows() -> None:
    for task in drawn("csv"):
        header, *rows = csv.reader(io.StringIO(said(task)))
        assert ",".join(header) in asked(task)
        assert str(len(rows)) in re.findall(r"\d+", asked(task))
        assert all(len(row) == len(header) for row in rows)
        for column in zip(*rows, strict=True):
            if column[0].isdigit():
                assert len({int(b) - int(a) for a, b in itertools.pairwise(column)}) == 1
            else:
                period = len(set(column))
                assert all(column[index] == column[index % period] for index in range(len(column)))


def test_json_follows_its_schema() -> None:
    kinds = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
    omitted = 0
    for task in drawn("json_schema"):
        start = asked(task).index('{"type": "object"')
        schema, _ = json.JSONDecoder().raw_decode(asked(task)[start:])
        value = json.loads(said(task))
        assert list(value) == [key for key in schema["properties"] if key in value]
        assert set(schema["required"]) <= set(value)
        for key, entry in value.items():
            shape = schema["properties"][key]
            assert type(entry) is kinds[shape["type"]]
            assert entry in shape.get("enum", [entry])
        omitted += len(value) < len(schema["properties"])
        assert not task.check(Reply(json.dumps({**value, "extra": 1})))
        assert task.check(Reply(json.dumps(value, indent=1)))
    assert omitted


def test_sorted_lists_are_sorted_permutations() -> None:
    for task in drawn("sort"):
        entries = said(task).split(", ")
        given = max(re.split(r"[:.\n]", asked(task)), key=lambda part: part.count(",")).strip()
        assert sorted(entries) == sorted(given.split(", "))
        values = [int(entry) for entry in entries] if entries[0].isdigit() else entries
        down = re.search("descending|largest to|decreasing|reverse|z to a", asked(task))
        assert values == sorted(values, reverse=bool(down))  # type: ignore[type-var]


def test_copies_stand_in_the_prompt() -> None:
    reversed_lists = 0
    for task in drawn("copy"):
        if said(task) not in asked(task):
            assert ", ".join(reversed(said(task).split(", "))) in asked(task)
            reversed_lists += 1
    assert COUNT / 6 < reversed_lists < COUNT / 2


# --- reasoning


def _operands(text: str) -> tuple[str, int, int]:
    a, b = map(int, re.findall(r"\d+", text))
    if re.search(r"-|minus|Subtract", text):
        return "-", *((b, a) if text.startswith("Subtract") else (a, b))
    return ("*" if re.search(r"\*|times|Multiply|product", text) else "+"), a, b


def test_sums_are_right() -> None:
    for task in (*drawn("add2"), *drawn("arith")):
        sign, a, b = _operands(asked(task))
        assert int(said(task)) == {"+": a + b, "-": a - b, "*": a * b}[sign]


def test_columns_are_true_and_short() -> None:
    for task in drawn("arith", count=400):
        work = task.answer["reasoning_content"]
        steps = re.findall(r"([\d+*-]+)=(\d+)", work)
        assert steps
        assert all(eval(left) == int(right) for left, right in steps)
        assert work.split()[-1] == said(task)
        # Digits are single tokens, words at most one each.
        assert len(re.findall(r"\d|[a-z]+|[^\w\s]| (?=\d)|\n", work)) <= 120


def test_a_tenth_of_the_pairs_is_held_out_and_met_nowhere_in_training() -> None:
    pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
    for sign in "+-":
        share = sum(held_out(pair_key(sign, b, a)) for a, b in pairs) / len(pairs)
        assert 0.08 < share < 0.12
    assert pair_key("+", 12, 34) == pair_key("+", 34, 12)
    for task in drawn("add2", "heldout"):
        assert held_out(pair_key(*_operands(asked(task))))
    for task in drawn("add2"):
        assert not held_out(pair_key(*_operands(asked(task))))
    met = 0
    for name in ("chain", "trace"):
        for task in drawn(name, count=400):
            for a, sign, b in re.findall(r"(?<!\S)(\d\d) ([+-]) (\d\d)\b", task.answer["reasoning_content"]):
                met += 1
                assert not held_out(pair_key(sign, int(a), int(b)))
    assert met > 200


def test_word_problems_chain_true_steps() -> None:
    for task in drawn("chain"):
        value = None
        for line in task.answer["reasoning_content"].split("\n"):
            left, right = line.split(" = ")
            assert eval(left) == int(right)
            start, _, amount = left.split()
            assert value in (None, start)
            assert amount in re.findall(r"\d+", asked(task))
            value = right
        assert value == said(task)


def test_orders_are_the_only_ones() -> None:
    more = ("taller", "older", "faster", "heavier", "richer", "before")
    for task in drawn("logic"):
        clues = re.findall(r"(\w+) (?:is|came in) (\w+?)(?: than)? ([A-Z]\w+)\.", asked(task))
        names = sorted({name for a, _, b in clues for name in (a, b)})
        above = [(a, b) if word in more else (b, a) for a, word, b in clues]
        fitting = [
            order
            for order in itertools.permutations(names)
            if all(order.index(a) < order.index(b) for a, b in above)
        ]
        assert len(fitting) == 1
        question = asked(task).rsplit(". ", 1)[-1]
        if "," in said(task):
            assert said(task) == ", ".join(fitting[0])
        else:
            top = re.search("tallest|oldest|fastest|heaviest|richest|first", question)
            assert said(task) == fitting[0][0 if top else -1]


def test_counts_are_right() -> None:
    for task in drawn("count"):
        question = asked(task)
        letter = re.search(r'letter "?(\w)"? (?:occur in "|in the word )(\w+)', question)
        contained = re.search(r"does (\w+) contain the letter (\w)", question)
        if letter:
            expected = letter[2].count(letter[1])
        elif contained:
            expected = contained[1].count(contained[2])
        else:
            parts = max(re.split(r"[:?\n]", question), key=lambda part: part.count(",")).strip().split(", ")
            what = re.search(r"does (\w+) occur|entries (\w+) in|these are (\w+)", question)
            expected = parts.count(next(filter(None, what.groups()))) if what else len(parts)
        assert int(said(task)) == expected


# --- code


def test_traces_print_what_python_prints() -> None:
    for task in drawn("trace", count=300):
        text = asked(task)
        source = text.split("```")[1].removeprefix("python") if "```" in text else text.split("\n\n", 1)[1]
        with redirect_stdout(io.StringIO()) as output:
            exec(source, {})
        assert output.getvalue().strip() == said(task)


def test_every_template_runs_in_the_sandbox() -> None:
    seen: set[str] = set()
    for index in range(2000):
        function = draw_function(random.Random(index))
        if function.name not in seen:
            seen.add(function.name)
            run = load(function.source, function.name)
            assert None not in [run(*arguments) for arguments in function.tests(8)]
    names = [name for template in TEMPLATES for name in template.names]
    assert set(names) <= seen
    assert len(names) == len(set(names))
    assert len(TEMPLATES) >= 60


def test_broken_functions_are_rejected_and_repaired_ones_accepted() -> None:
    for task in drawn("fix", count=60):
        broken = asked(task).split("```")[1].removeprefix("python").strip()
        assert not task.check(Reply(broken))
        assert not task.check(Reply(f"```python\n{broken}\n```"))
        assert task.check(reply_of(task.answer))


def test_other_code_with_the_same_meaning_is_accepted() -> None:
    task = next(task for task in drawn("function", count=2000) if "numbers that are greater" in asked(task)
                or ("returns the numbers of" in asked(task) and "greater" in asked(task)))  # fmt: skip
    source = unfenced(said(task)) or ""
    head, body = source.strip().split("\n")
    match = re.match(r"\s+return \[item for item in (\w+) if item > (\w+)\]", body)
    assert match
    other = (
        f"{head}\n    kept = []\n    for entry in {match[1]}:\n        if not entry <= {match[2]}:\n"
        "            kept.append(entry)\n    return kept"
    )
    assert task.check(Reply(f"Sure:\n```python\n{other}\n```\nDone."))
    assert not task.check(Reply(f"```python\n{other}"))


@pytest.mark.parametrize(
    "body",
    [
        "import os\n    return 1",
        "return ().__class__",
        "return __import__('os')",
        "return '{0.real}'.format(1)",
        "return (lambda: 1)()",
        "return f'{1:>100000}'",
        "return str.upper",
        "global y\n    y = 1",
        "_op = 1\n    return 1",
        "@print\n    def g(): pass",
        "return b'x'",
    ],
)
def test_unsafe_sources_are_not_loaded(body: str) -> None:
    compile(f"def f():\n    {body}", "<test>", "exec")
    with pytest.raises(Refused):
        load(f"def f():\n    {body}", "f")


@pytest.mark.parametrize("name", ["open", "eval", "exec", "getattr", "print", "type", "globals"])
def test_other_builtins_do_not_exist(name: str) -> None:
    for body in (f"return {name}('1')", f"return sorted(['1'], key={name})"):
        with pytest.raises(NameError):
            load(f"def f():\n    {body}", "f")()


# Two equal lists whose items are lists that were filled later, five levels deep.
_GROWN = """x, y = [], []
    a, b = x, y
    for i in range(5):
        c, d = [], []
        for j in range(400):
            a.append(c)
            b.append(d)
        a, b = c, d
    """


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n        pass",
        "return 9 ** 9 ** 9",
        "x = 3\n    for i in range(900):\n        x *= x\n    return x",
        "x = 'ab'\n    for i in range(900):\n        x += x\n    return x",
        "return [0] * 10 ** 8",
        "return list(range(10 ** 8))",
        "return sum(1 for i in range(900) for j in range(900))",
        "return f() + f()",
        "return '%9999999d' % 1",
        "x = [0] * 900\n    x = [x] * 900\n    return str([x] * 900)",
        "return round(1, -(10 ** 8))",
        "x = y = [0]\n    for i in range(60):\n        x = [x, x]\n        y = [y, y]\n    return x == y",
        "x = (0,)\n    for i in range(60):\n        x = (x, x)\n    return {x}",
        f"{_GROWN}return x == y",
        f"{_GROWN}return [x].count(y)",
        f"{_GROWN}return sorted(zip([x, y], [1, 2]))",
        f"{_GROWN}return sum(zip([x], [y]), ())",
    ],
)
def test_costly_sources_are_stopped(body: str) -> None:
    function = load(f"def f():\n    {body}", "f")
    with pytest.raises((Refused, RecursionError)):
        function()


def test_a_loop_s_unused_variable_may_be_an_underscore() -> None:
    assert load("def f(n):\n    x = 1\n    for _ in range(n):\n        x *= 2\n    return x", "f")(5) == 32


@pytest.mark.parametrize(
    "source", ["", "x = 1", "def g():\n    return 1", "def f(:", "def f():\n return 1\nf()"]
)
def test_only_the_one_function_is_loaded(source: str) -> None:
    with pytest.raises(Refused):
        load(source, "f")
