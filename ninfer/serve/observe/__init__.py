"""What the server tells the world about itself: console, request log, metrics, prefill misses.

`build` makes them all; `configure` sets up the console log before anything else is done.
"""

from ninfer.frontend import Frontend
from ninfer.serve.observe.console import Console
from ninfer.serve.observe.observers import Observers
from ninfer.serve.observe.stderr import LEVELS, configure
from ninfer.serve.options import ServeOptions

__all__ = ["LEVELS", "Console", "Observers", "build", "configure"]


def build(options: ServeOptions, frontend: Frontend) -> Observers:
    """The observers that the options ask for. Opens the request log; raises OptionError if that can't be."""
    return Observers(options, frontend)
