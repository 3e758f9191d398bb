"""The Jinja dialect: equal to a plain environment set up as Hugging Face does, plus provenance."""

import json
from datetime import datetime
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ninfer.errors import FrontendError
from ninfer.frontend import maintained_template
from ninfer.frontend.provenance import TemplateText, spans_of
from ninfer.frontend.template import MAX_TEMPLATE_BYTES, ChatTemplate


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(variables)


def controls(text: str, spelling: str = "<E>") -> int:
    """How many times the template itself wrote `spelling`."""
    return sum(str.__str__(text)[b:e].count(spelling) for b, e in spans_of(text))


DIALECT = [
    "{% for x in [1, 2, 3] %}\n  {% if x == 2 %}{% continue %}{% endif %}\n  {{ x }}\n{% endfor %}\n",
    "{%- set ns = namespace(a='') %}{% for x in data %}{% set ns.a = ns.a + x ~ '-' %}{% endfor %}{{ ns.a }}",
    "{% macro m(a, b='<E>') %}[{{ a }}{{ b }}]{% endmacro %}{{ m('x') + m(b=1, a=data[0]) }}",
    "{% set body %}<E>{{ data[1] }}{% endset %}{{ body | trim | upper }}{{ body | length }}",
    "{{ data | join('<E>') }}|{{ data | join }}|{{ [{'k': 'v'}] | join(', ', attribute='k') }}",
    "{{ data | tojson }}{{ {'a': 'é<>&', 'b': [1.5, none, true]} | tojson(indent=2) }}",
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{{ '%s<E>%d' | format('x', 3) }}{{ '{}<E>{k!r:>5}' .format(data[0], k='q') }}{{ '%s%%' % 'p' }}",
    "{{ data[0] is string }}{{ data is iterable }}{{ nothing is defined }}{{ nothing }}{{ none }}",
    "{{ (data[2].split('</think>')[-1]).lstrip('\\n') }}{{ data[2].startswith('<think>') }}",
    "{{ 'a' 'b' ~ 1 ~ 2.5 }}{{ 'x' * 3 }}{{ 'abc'[1:] }}{{ 'abc' | replace('b', '<E>') }}",
    "{{ 'a,b'.split(',') }}{{ 'a,b' | length }}{{ 'ab' | reverse }}{{ 'a b' | wordcount }}",
    "{{ data | map('trim') | select | list | first }}{{ '<E>' | safe }}{{ '<E>' | string | e }}",
    "{% for a, b in {'k': '<E>'} | items %}{{ a }}={{ b }}{{ loop.last }}{{ loop.previtem }}{% endfor %}",
    "{% filter upper %}x{{ data[0] }}{% endfilter %}{% raw %}{{ }}{% endraw %}{# gone #}\n",
]


@pytest.mark.parametrize("source", DIALECT)
def test_same_text_as_a_plain_environment(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = lambda x, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    data = {"data": [" x ", "y<E>", "<think>\na\n</think>\n\nb"]}
    assert str.__str__(render(source, **data)) == plain.from_string(source).render(data)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a<E>b{{ d }}", 1),
        ("{{ '<E>' + d }}{{ d + '<E>' }}{{ d ~ '<E>' }}{{ '<' ~ 'E' ~ '>' }}", 4),
        ("{{ ('<E>' + d)|trim }}{{ (d + '<E>').strip() }}{{ ('  <E>' + d).lstrip() }}", 3),
        ("{{ ('<E>' + d).split('|')[0] }}{{ ('<E>|' + d).split('|')|join('<E>') }}", 4),
        ("{{ d.split('|')|join('<E>') }}", 1),
        ("{% set x %}<E>{{ d }}{% endset %}{{ x }}{{ x|trim }}{{ x ~ x }}", 4),
        ("{% macro m(x) %}<E>{{ x }}{% endmacro %}{{ m(d) }}{{ m('<E>') + 'q' }}", 3),
        (
            "{% set n = namespace(t='') %}{% for i in 'ab' %}{% set n.t = n.t ~ '<E>' %}{% endfor %}{{n.t}}",
            2,
        ),
        ("{{ {'a': '<E>'}['a'] }}{{ ['<E>', d]|first }}{{ ['x', '<E>'][1] }}{{ '<E>' if d else d }}", 4),
        ("{{ '{}<E>{}'.format(d, '<E>') }}{{ '%s<E>' % d }}{{ '%s<E>'|format(d) }}", 4),
        ("{{ 'AxB'.replace('x', '<E>') }}{{ '<E>'|safe }}{{ '<E>'|string }}{{ ''|default('<E>', true) }}", 4),
        ("{{ d }}{{ d|trim }}{{ [d]|tojson }}{{ ['<E>']|tojson }}{{ d|replace('<', '<') }}", 1),
        ("{{ '<' + d[1:2] + '>' }}{{ '<' + 'E>'|replace('E', d[1:2]) }}", 0),
        ("{% generation %}<E>{{ d }}{% endgeneration %}", 1),
        ("{{ t }}{{ t + d }}", 2),
    ],
)
def test_control_text_comes_from_the_template_alone(source: str, count: int) -> None:
    assert controls(render(source, d="<E>|<E>", t=TemplateText.literal("<E>"))) == count


def test_tojson_keeps_order_and_characters() -> None:
    value = {"z": "é<&>'", "a": {"y": 1, "b": [1.0, 10**20]}}
    expected = '{"z": "é<&>\'", "a": {"y": 1, "b": [1.0, 100000000000000000000]}}'
    assert render("{{ v | tojson }}", v=value) == expected


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_refusal_carries_the_templates_words() -> None:
    with pytest.raises(FrontendError, match=r"refused the conversation: Only one system message\."):
        render("{{ raise_exception('Only one system message.') }}")


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(FrontendError, match=r"not valid Jinja: .*\(line 3\)"):
        ChatTemplate("a\nb\n{% if %}")
    with pytest.raises(FrontendError, match="unknown tag 'nonsense'"):
        ChatTemplate("{% nonsense %}")
    with pytest.raises(FrontendError, match="No filter named 'nofilter'"):
        ChatTemplate("{{ x | nofilter }}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("\n\n{{ missing.member }}", r"lacks: 'missing' is undefined \(line 3"),
        ("\n{{ d.nothing.member }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", r"division by zero \(line 1"),
        ("{{ 'a' + 1 }}", "line 1"),
        ("{{ missing | tojson }}", "not JSON serializable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ d.update({'a': 1}) }}", "not safely callable|unsafe"),
        ("{{ l.append(1) }}", "not safely callable|unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{% include 'other' %}", "no loader"),
        ("{{ cycler() }}", "at least one item"),
        ("\n{{ 'abc' | truncate(1) }}", r"expected length >= 3.*line 2"),
    ],
)
def test_failures_name_cause_and_line(source: str, words: str) -> None:
    with pytest.raises(FrontendError, match=words):
        render(source, d={}, l=[])


def test_oversized_template() -> None:
    with pytest.raises(FrontendError, match="at most 16777216"):
        ChatTemplate("x" * (MAX_TEMPLATE_BYTES + 1))


def test_garbage_never_raises_anything_else() -> None:
    for source in ("{{", "{%", "{% for %}", "{{ }}", "{% macro %}", "}}{{ 1", "{{ 'a }}", "\x00{{ \ud800 }}"):
        with pytest.raises(FrontendError):
            ChatTemplate(source).render({})


def test_maintained_templates_by_name() -> None:
    assert "Qwen3.8" in maintained_template("qwen3_8")
    with pytest.raises(FrontendError, match="no chat template 'qwen9'; known are qwen3_6, qwen3_8"):
        maintained_template("qwen9")
