"""Tool calls in an answer, read strictly, as the frontend does it: the benchmark forgives no slip of form."""

from ninfer.frontend.calls import Parsed, parse_calls

__all__ = ["Parsed", "parse_calls"]
