"""Names of devices, known before anything is imported that could use one."""

import re

from ninfer.errors import OptionError

NAMES = "cpu, cuda, cuda:N or auto"


def check_device(name: object, option: str = "device") -> str:
    """The name as others spell it (`1` is `cuda:1`); OptionError if it is none. Looks at no device."""
    text = name if isinstance(name, str) else ""
    if re.fullmatch(r"[0-9]{1,3}", text):
        text = f"cuda:{text}"
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise OptionError(f"{option} must be {NAMES}, not {name!r:.80}")
    return text
