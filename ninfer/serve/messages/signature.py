"""Reasoning that the client must carry without seeing it: text in a thinking block's `signature`."""

from __future__ import annotations

import base64

_PREFIX = "ninfer-reasoning.v1:"


def sealed(reasoning: str) -> str:
    """The signature that holds `reasoning`."""
    return _PREFIX + base64.b64encode(reasoning.encode("utf-8")).decode("ascii")


def opened(signature: str) -> str:
    """The reasoning in a signature of ours, nothing in others. Raises ValueError for a damaged one."""
    if not signature.startswith(_PREFIX):
        return ""
    return base64.b64decode(signature[len(_PREFIX) :], validate=True).decode("utf-8")
