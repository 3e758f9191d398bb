"""What the routes share: one object made at start, handed to each protocol's router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ninfer.frontend import Frontend
from ninfer.serve.jobs import Link
from ninfer.serve.options import ServeOptions

if TYPE_CHECKING:
    from ninfer.serve.generation import Service


@dataclass(frozen=True)
class Server:
    """`model_id` is the public name; `names` all that a request may use."""

    options: ServeOptions
    frontend: Frontend
    link: Link
    service: Service
    model_id: str
    names: frozenset[str]
