"""Reasoning that the client must carry without seeing it: text in a thinking block's `signature`."""

from __future__ import annotations

import base64
import binascii

from ninfer.serve.errors import invalid

_PREFIX = "ninfer-reasoning.v1:"


def sealed(reasoning: str) -> str:
    """The signature that holds `reasoning`."""
    return _PREFIX + base64.b64encode(reasoning.encode("utf-8")).decode("ascii")


def opened(signature: str, where: str) -> str:
    """The reasoning in a signature of ours; nothing in anybody else's. A damaged one of ours is a 400."""
    if not signature.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(signature[len(_PREFIX) :], validate=True).decode("utf-8")
    except (binascii.Error, ValueError) as error:
        raise invalid(
            f"{where} is one of this server's, but damaged; send it back unchanged.",
            where,
            "invalid_thinking_signature",
        ) from error
