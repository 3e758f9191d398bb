"""Reasoning that the client carries without seeing it: text in a thinking block's `signature` (Messages) or
a reasoning item's `encrypted_content` (Responses)."""

from __future__ import annotations

import base64

_PREFIX = "ninfer-reasoning.v1:"


def sealed(reasoning: str) -> str:
    """What holds `reasoning`: a mark of ours, and its UTF-8 text in Base64."""
    return _PREFIX + base64.b64encode(reasoning.encode("utf-8")).decode("ascii")


def opened(seal: str) -> str:
    """The reasoning in a seal of ours, nothing in those of others. Raises ValueError for a damaged one."""
    if not seal.startswith(_PREFIX):
        return ""
    return base64.b64decode(seal[len(_PREFIX) :], validate=True).decode("utf-8")
