"""What the commands of this folder share: an expected error is one sentence and exit code 1."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ninfer.cli.common import printable
from ninfer.errors import NInferError


def exit_code(action: Callable[[], object]) -> int:
    """Of a command that is `action`; a defect of ours keeps its traceback."""
    try:
        action()
    except NInferError as error:
        sentence = str(error)
    except OSError as error:
        sentence = f"{error.filename or 'input or output failed'}: {error.strerror or error}"
    else:
        return 0
    print(f"error: {printable(sentence)}", file=sys.stderr)
    return 1
