"""What of a request is enforced in sampling: a grammar for the answer, or none."""

from __future__ import annotations

from ninfer.serve.calls import GenerationRequest


def constraint_for(request: GenerationRequest) -> str | None:
    """The Lark grammar of the answer behind its thinking block; None if anything may come.

    Raises `ApiError` for a schema that can't be enforced.
    """
    return None
