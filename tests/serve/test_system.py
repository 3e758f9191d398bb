"""Conversations with several system messages, for templates that take one at the start."""

from __future__ import annotations

from ninfer.serve.system import fold_system, takes_system_anywhere

from .fakes import nano_frontend


def test_what_stands_first_becomes_one_message() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    conversation = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": parts},
        {"role": "user", "content": "d"},
    ]
    assert fold_system(conversation) == [
        {"role": "system", "content": "a\n\nbc"},
        {"role": "user", "content": "d"},
    ]
    assert conversation[1]["content"] is parts


def test_later_ones_go_to_the_user() -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "developer", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    assert fold_system(conversation) == [
        {"role": "user", "content": "a\n\n<system-reminder>\nb\n</system-reminder>"},
        {"role": "assistant", "content": "c"},
    ]


def test_conversations_without_them_stay() -> None:
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    assert fold_system(conversation) == conversation


def test_the_maintained_template_takes_them_anywhere() -> None:
    assert takes_system_anywhere(nano_frontend())
