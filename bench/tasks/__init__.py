"""Tasks whose answers a program can check, drawn from seeds, and a benchmark (`python -m bench.tasks`).

| file | holds |
|---|---|
| `task.py`, `registry.py` | what a task is; all generators by name |
| `splits.py` | which instances are held out |
| `draft.py`, `turns.py` | from a drawn question to a task: the conversation around it |
| `structured.py` (`jsonl.py`, `facts.py`), `reasoning.py` | generators, on `draft.py` |
| `code.py` (`python_functions.py`, `sandbox.py`) | generators, on `draft.py`; running what a model wrote |
| `retrieval.py`, `story.py` (`storybook.py`), `translation.py` (`orvali.py`) | generators, on `turns.py` |
| `tools.py` (`catalogue.py`, `functions.py`, `argument_values.py`) | generators, on `turns.py` |
| `pools.py` | names and words for all |
| `suite.py`, `run.py`, `calls.py` | the benchmark: which instances, answers of a model, calls in them |
| `report.py`, `table.py`, `plot.py`, `__main__.py` | what the runs add up to, shown; the command line |

Instances are frozen (tests/bench/test_instances_are_frozen.py): a model was trained on them.
"""

from bench.tasks.registry import generators
from bench.tasks.structured import canonical_jsonl

__all__ = ["canonical_jsonl", "generators"]
