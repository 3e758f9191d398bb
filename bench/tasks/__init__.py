"""Tasks whose answers a program can check, drawn from seeds, and a benchmark (`python -m bench.tasks`)."""

from bench.tasks.registry import generators
from bench.tasks.structured import canonical_jsonl

__all__ = ["canonical_jsonl", "generators"]
