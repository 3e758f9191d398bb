"""Templates of small Python functions: what they do in words, and the code that does it.

A template's fields: {a} {b} {c} its parameters; {k} {j} constants (k < j); {ch} a letter; {u} a word.
Parameters have a kind each: n an integer, s a string, v a list of integers, w a list of strings. Test lists
and strings are never empty.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from bench.tasks.pools import WORDS


@dataclass(frozen=True, slots=True)
class Template:
    names: tuple[str, ...]
    kinds: str
    says: tuple[str, ...]
    body: str


def _t(names: str, kinds: str, says: str, body: str) -> Template:
    return Template(tuple(names.split()), kinds, tuple(says.split(" | ")), body.replace("\n", "\n    "))


TEMPLATES = (
    # integers
    _t("add_const shift raise_by", "n", "returns {a} plus {k} | adds {k} to {a} and returns the sum",
       "return {a} + {k}"),
    _t("reduce_by minus lower", "n", "returns {a} minus {k} | subtracts {k} from {a}", "return {a} - {k}"),
    _t("scale multiply enlarge", "n", "returns {a} times {k} | multiplies {a} by {k}", "return {a} * {k}"),
    _t("linear line affine", "n", "returns {k} times {a} plus {j}", "return {k} * {a} + {j}"),
    _t("scaled_less rebate", "n", "multiplies {a} by {j} and subtracts {k} from the product",
       "return {a} * {j} - {k}"),
    _t("square squared", "n", "returns the square of {a}", "return {a} * {a}"),
    _t("square_plus parabola", "n", "returns the square of {a} plus {k}", "return {a} * {a} + {k}"),
    _t("whole_part share split_up", "n", "returns how often {k} fits into {a}, using floor division",
       "return {a} // {k}"),
    _t("rest remainder left_over", "n", "returns the remainder of {a} divided by {k}", "return {a} % {k}"),
    _t("is_even even", "n", "returns True if {a} is even, else False", "return {a} % 2 == 0"),
    _t("divisible is_multiple", "n", "tells whether {a} is divisible by {k}", "return {a} % {k} == 0"),
    _t("is_large above over_limit", "n", "tells whether {a} is greater than {k}", "return {a} > {k}"),
    _t("at_least reaches", "n", "tells whether {a} is at least {k}", "return {a} >= {k}"),
    _t("in_range between", "n", "tells whether {a} lies between {k} and {j}, both included",
       "return {k} <= {a} <= {j}"),
    _t("distance_to gap", "n", "returns the absolute difference of {a} and {k}", "return abs({a} - {k})"),
    _t("clamp limit", "n", "limits {a} to the range from {k} to {j}", "return max({k}, min({a}, {j}))"),
    _t("cap at_most", "n", "returns {a}, but never more than {k}", "return min({a}, {k})"),
    _t("floor_at raise_to", "n", "returns {a}, but never less than {k}", "return max({a}, {k})"),
    _t("sign sign_of", "n", "returns 1 if {a} is positive, -1 if it is negative, and 0 otherwise",
       "if {a} > 0:\n    return 1\nif {a} < 0:\n    return -1\nreturn 0"),
    _t("label size_name", "n", "returns \"big\" if {a} is greater than {k}, else \"small\"",
       "if {a} > {k}:\n    return \"big\"\nreturn \"small\""),
    _t("parity kind_of", "n", "returns \"even\" if {a} is even and \"odd\" otherwise",
       "if {a} % 2 == 0:\n    return \"even\"\nreturn \"odd\""),
    _t("fare price fee", "n", "returns {k} if {a} is less than {j}, and twice {k} otherwise",
       "if {a} < {j}:\n    return {k}\nreturn 2 * {k}"),
    _t("sum_to triangle", "n", "returns the sum of the integers from 1 to {a}",
       "total = 0\nfor i in range(1, {a} + 1):\n    total += i\nreturn total"),
    _t("sum_squares squares_to", "n", "returns the sum of the squares of 1 to {a}",
       "total = 0\nfor i in range(1, {a} + 1):\n    total += i * i\nreturn total"),
    _t("multiples table", "n", "returns a list of the first {k} multiples of {a}, beginning with {a}",
       "return [{a} * i for i in range(1, {k} + 1)]"),
    _t("count_up numbers_to", "n", "returns the list of the integers from 0 up to but not including {a}",
       "return list(range({a}))"),
    _t("digit_sum cross_sum", "n", "returns the sum of the digits of the absolute value of {a}",
       "total = 0\nfor item in str(abs({a})):\n    total += int(item)\nreturn total"),
    # two or three integers
    _t("add plus total_of", "nn", "returns the sum of {a} and {b}", "return {a} + {b}"),
    _t("difference subtract", "nn", "returns {a} minus {b}", "return {a} - {b}"),
    _t("product times", "nn", "returns the product of {a} and {b}", "return {a} * {b}"),
    _t("larger maximum", "nn", "returns the larger of {a} and {b}", "return max({a}, {b})"),
    _t("smaller minimum", "nn", "returns the smaller of {a} and {b}", "return min({a}, {b})"),
    _t("weighted mix", "nn", "returns {k} times {a} plus {j} times {b}", "return {k} * {a} + {j} * {b}"),
    _t("perimeter border", "nn", "returns the perimeter of a rectangle with sides {a} and {b}",
       "return 2 * ({a} + {b})"),
    _t("gap_between apart", "nn", "returns the absolute difference of {a} and {b}", "return abs({a} - {b})"),
    _t("sum_less balance", "nnn", "adds {a} and {b} and subtracts {c}", "return {a} + {b} - {c}"),
    _t("middle_product combine", "nnn", "returns {a} plus the product of {b} and {c}",
       "return {a} + {b} * {c}"),
    # strings
    _t("shout upper_case", "s", "returns {a} in upper case", "return {a}.upper()"),
    _t("whisper lower_case", "s", "returns {a} in lower case", "return {a}.lower()"),
    _t("backwards reverse_text", "s", "returns {a} reversed", "return {a}[::-1]"),
    _t("first_chars prefix head", "s", "returns the first {k} characters of {a}", "return {a}[:{k}]"),
    _t("last_chars suffix", "s", "returns the last {k} characters of {a}", "return {a}[-{k}:]"),
    _t("drop_first cut", "s", "returns {a} without its first {k} characters", "return {a}[{k}:]"),
    _t("count_letter occurrences", "s", "returns how often the letter \"{ch}\" occurs in {a}",
       "return {a}.count(\"{ch}\")"),
    _t("starts_with_letter begins", "s", "tells whether {a} starts with \"{ch}\"",
       "return {a}.startswith(\"{ch}\")"),
    _t("ends_with_letter finishes", "s", "tells whether {a} ends with \"{ch}\"",
       "return {a}.endswith(\"{ch}\")"),
    _t("greet prefixed tag", "s", "returns \"{u} \" followed by {a}", "return \"{u} \" + {a}"),
    _t("mark suffixed", "s", "appends \"-{u}\" to {a}", "return {a} + \"-{u}\""),
    _t("repeat_text again", "s", "returns {a} repeated {k} times", "return {a} * {k}"),
    _t("is_long longer_than", "s", "tells whether {a} has more than {k} characters", "return len({a}) > {k}"),
    _t("count_words words_in", "s", "returns the number of words in {a}", "return len({a}.split())"),
    _t("swap_letter replace_letter", "s", "replaces every \"{ch}\" in {a} by \"*\"",
       "return {a}.replace(\"{ch}\", \"*\")"),
    _t("without_spaces squeeze", "s", "removes all spaces from {a}", "return {a}.replace(\" \", \"\")"),
    _t("count_vowels vowels", "s", "counts the vowels a, e, i, o, u in {a}",
       "total = 0\nfor item in {a}:\n    if item in \"aeiou\":\n        total += 1\nreturn total"),
    _t("is_palindrome mirrored", "s", "tells whether {a} reads the same backwards",
       "return {a} == {a}[::-1]"),
    _t("joined_with couple", "ss", "returns {a} and {b} joined by \"{u}\"", "return {a} + \"{u}\" + {b}"),
    _t("same_length equal_length", "ss", "tells whether {a} and {b} have the same length",
       "return len({a}) == len({b})"),
    # lists of integers
    _t("total add_up", "v", "returns the sum of {a} | adds up all numbers in {a}", "return sum({a})"),
    _t("largest highest", "v", "returns the largest number in {a}", "return max({a})"),
    _t("smallest lowest", "v", "returns the smallest number in {a}", "return min({a})"),
    _t("spread span", "v", "returns the difference of the largest and the smallest number in {a}",
       "return max({a}) - min({a})"),
    _t("first_items take", "v", "returns the first {k} entries of {a}", "return {a}[:{k}]"),
    _t("sorted_up ascending", "v", "returns {a} sorted in ascending order", "return sorted({a})"),
    _t("sorted_down descending", "v", "returns {a} sorted in descending order",
       "return sorted({a}, reverse=True)"),
    _t("reversed_list turn", "v", "returns {a} in reverse order", "return {a}[::-1]"),
    _t("evens keep_even", "v", "returns the even numbers of {a} in their order",
       "return [item for item in {a} if item % 2 == 0]"),
    _t("keep_large above_limit", "v", "returns the numbers of {a} that are greater than {k}",
       "return [item for item in {a} if item > {k}]"),
    _t("keep_small below_limit", "v", "returns the numbers of {a} that are less than {k}",
       "return [item for item in {a} if item < {k}]"),
    _t("scaled times_all", "v", "returns a list with every number of {a} multiplied by {k}",
       "return [item * {k} for item in {a}]"),
    _t("shifted add_to_all", "v", "returns a list with {k} added to every number of {a}",
       "return [item + {k} for item in {a}]"),
    _t("count_large how_many_above", "v", "counts the numbers in {a} that are greater than {k}",
       "total = 0\nfor item in {a}:\n    if item > {k}:\n        total += 1\nreturn total"),
    _t("count_value times_found", "v", "counts how often {k} occurs in {a}", "return {a}.count({k})"),
    _t("sum_even even_total", "v", "returns the sum of the even numbers in {a}",
       "total = 0\nfor item in {a}:\n    if item % 2 == 0:\n        total += item\nreturn total"),
    _t("product_of multiply_all", "v", "returns the product of all numbers in {a}",
       "result = 1\nfor item in {a}:\n    result *= item\nreturn result"),
    _t("running partial_sums", "v", "returns the list of the running sums of {a}",
       "total = 0\nresult = []\nfor item in {a}:\n    total += item\n"
       "    result.append(total)\nreturn result"),
    _t("every_second alternate", "v", "returns every second entry of {a}, beginning with the first",
       "return {a}[::2]"),
    _t("ends first_plus_last", "v", "returns the sum of the first and the last entry of {a}",
       "return {a}[0] + {a}[-1]"),
    _t("all_above minimum_met", "v", "tells whether all numbers in {a} are greater than {k}",
       "return all(item > {k} for item in {a})"),
    _t("has_value includes", "vn", "tells whether {b} is in {a}", "return {b} in {a}"),
    _t("larger_than filter_by", "vn", "returns the numbers of {a} that are greater than {b}",
       "return [item for item in {a} if item > {b}]"),
    # lists of strings
    _t("join_words sentence", "w", "joins the strings in {a} with single spaces", "return \" \".join({a})"),
    _t("join_by glue", "w", "joins the strings in {a} with \"-\"", "return \"-\".join({a})"),
    _t("lengths sizes", "w", "returns the list of the lengths of the strings in {a}",
       "return [len(item) for item in {a}]"),
    _t("longest_word longest", "w", "returns the longest string in {a}, the first one if there are several",
       "return max({a}, key=len)"),
    _t("short_ones keep_short", "w", "returns the strings in {a} with at most {k} characters",
       "return [item for item in {a} if len(item) <= {k}]"),
    _t("all_upper shout_all", "w", "returns a list of the strings in {a} in upper case",
       "return [item.upper() for item in {a}]"),
    _t("initials first_letters", "w", "returns a string of the first characters of the strings in {a}",
       "return \"\".join(item[0] for item in {a})"),
    _t("starting_with filter_words", "w", "returns the strings in {a} that start with \"{ch}\"",
       "return [item for item in {a} if item.startswith(\"{ch}\")]"),
    _t("total_length letters", "w", "returns the total number of characters of the strings in {a}",
       "return sum(len(item) for item in {a})"),
)  # fmt: skip

_PARAMETERS = {
    "n": ("n", "x", "y", "value", "number", "num", "amount", "count"),
    "s": ("s", "text", "word", "string", "line", "name"),
    "v": ("numbers", "values", "nums", "data", "xs", "scores"),
    "w": ("words", "names", "parts", "lines", "labels"),
}
_PLAIN_NAMES = ("f", "g", "func", "compute", "solve", "run", "calc", "answer")


@dataclass(frozen=True, slots=True)
class Function:
    """One drawn function: signature, what it returns in words, its source, and the seed of its tests."""

    name: str
    signature: str
    says: str
    source: str
    kinds: str
    constants: tuple[int, int]
    letter: str

    def tests(self, count: int) -> list[tuple[Any, ...]]:
        """Arguments of `count` calls, the same for equal sources; limits and their neighbours are likely."""
        rng = random.Random(self.source)
        k, j = self.constants
        near = (k, k, k - 1, k + 1, j, j - 1, j + 1, 0, 1, 2, 3)

        def integer() -> int:
            return rng.choice(near) if rng.random() < 0.6 else rng.randint(-30, 60)

        def text() -> str:
            words = rng.sample(WORDS, rng.randint(1, 3))
            if rng.random() < 0.4:
                words[0] = self.letter + words[0]
            if rng.random() < 0.4:
                words[-1] += self.letter
            line = " ".join(words)
            if rng.random() < 0.2:
                line += line[::-1]
            return line.title() if rng.random() < 0.3 else line

        def argument(kind: str) -> Any:
            if kind == "n":
                return integer()
            if kind == "s":
                return text() if rng.random() < 0.7 else text()[: rng.randint(1, k + 1)]
            if kind == "v":
                return [integer() for _ in range(rng.randint(1, 7))]
            return [text() if rng.random() < 0.3 else text().split()[0][: k + rng.randint(-1, 1)] or "a"
                    for _ in range(rng.randint(1, 6))]  # fmt: skip

        return [tuple(argument(kind) for kind in self.kinds) for _ in range(count)]


def draw_function(rng: random.Random) -> Function:
    template = rng.choice(TEMPLATES)
    parameters: list[str] = []
    for kind in template.kinds:
        parameters.append(rng.choice([name for name in _PARAMETERS[kind] if name not in parameters]))
    k = rng.randint(2, 12)
    j = k + rng.randint(1, 20)
    fields = dict(zip("abc", parameters, strict=False))
    letter, word = rng.choice("abcdefghilmnoprst"), rng.choice(WORDS)
    name = rng.choice(template.names if rng.random() < 0.8 else _PLAIN_NAMES)
    signature = f"{name}({', '.join(parameters)})"
    body = template.body.format(k=k, j=j, ch=letter, u=word, **fields)
    marked = {field: f"`{value}`" for field, value in fields.items()}
    says = rng.choice(template.says).format(k=k, j=j, ch=letter, u=word, **marked)
    return Function(name, signature, says, f"def {signature}:\n    {body}", template.kinds, (k, j), letter)
