"""`ninfer-serve` as it is, with the scripted engine process in place of its own."""

from __future__ import annotations

import sys
from functools import partial

if __name__ == "__main__":
    from ninfer.cli.serve import main
    from ninfer.serve import run

    worker = (sys.executable, "-m", "tools.agents.scripted_worker")
    setattr(run, "serve", partial(run.serve, worker=worker))  # noqa: B010  (checkers know it as a function)
    sys.exit(main())
