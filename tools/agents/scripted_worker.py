"""The engine process of the server, except that its sessions are forced."""

from __future__ import annotations

import sys
from typing import Any

from ninfer.frontend import Frontend, Prompt
from tools.agents.forced import ForcedSession, scripted_session

_real_session = Frontend.session


def _session(frontend: Frontend, prompt: Prompt, **options: Any) -> ForcedSession:
    return scripted_session(frontend, prompt, _real_session(frontend, prompt, **options))


if __name__ == "__main__":
    setattr(Frontend, "session", _session)  # noqa: B010  (a checker can't know that it is one)
    from ninfer.serve.worker import main

    sys.exit(main())
