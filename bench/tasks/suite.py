"""Which instances are run: held-out draws of the chosen generators, and tasks that exist once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.tasks.task import CATEGORIES, Generator, Task, rng_for
from ninfer.errors import OptionError


@dataclass(frozen=True)
class Entry:
    """A row of the table: `draw(i)` is held-out instance i; `limit` instances exist (None: any number)."""

    name: str
    draw: Callable[[int], Task]
    limit: int | None = None


@dataclass(frozen=True)
class Group:
    """The instances to run of one entry; instance i is `tasks[i]`."""

    name: str
    category: str
    tasks: tuple[Task, ...]


def entries(generators: Mapping[str, Generator], single: Mapping[str, Callable[[], Task]]) -> list[Entry]:
    """Everything that can be run: `generators`, and the tasks of which there is one."""

    def held_out(name: str, generator: Generator) -> Callable[[int], Task]:
        return lambda index: generator(rng_for(name, "heldout", index), "heldout")

    drawn = [Entry(name, held_out(name, generator)) for name, generator in generators.items()]
    fixed = [Entry(name, lambda _, make=make: make(), limit=1) for name, make in single.items()]
    return drawn + fixed


def available() -> list[Entry]:
    """What this repository has."""
    from bench.tasks.registry import generators
    from bench.tasks.structured import canonical_jsonl

    return entries(generators(), {"jsonl32_canonical": canonical_jsonl})


def choose(everything: Sequence[Entry], names: Sequence[str], per_task: int) -> list[Group]:
    """`per_task` instances of every entry that `names` or its category is among (no names: of all).

    Ordered by category, then as given. Raises OptionError for a name that is neither.
    """
    if per_task < 1:
        raise OptionError(f"--per-task must be at least 1, not {per_task}")
    firsts = {entry.name: entry.draw(0) for entry in everything}
    categories = {name: task.category for name, task in firsts.items()}
    unknown = set(names) - categories.keys() - set(categories.values())
    if unknown:
        raise OptionError(
            f"there is no task or category {', '.join(sorted(unknown))}; tasks: {', '.join(categories)}; "
            f"categories: {', '.join(_ordered(set(categories.values())))}"
        )
    groups = []
    for entry in everything:
        category = categories[entry.name]
        if not names or entry.name in names or category in names:
            count = min(per_task, entry.limit or per_task)
            tasks = (firsts[entry.name], *(entry.draw(index) for index in range(1, count)))
            groups.append(Group(entry.name, category, tasks))
    return sorted(groups, key=lambda group: CATEGORIES.index(group.category))


def _ordered(categories: set[str]) -> list[str]:
    return sorted(categories, key=CATEGORIES.index)
