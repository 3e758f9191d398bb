"""Where files of ours are kept between runs: converted checkpoints and compiled kernels."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """`$NINFER_CACHE`, or `ninfer` in the platform's cache folder for this user."""
    stated = os.environ.get("NINFER_CACHE")
    if stated:
        return Path(stated)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ninfer" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ninfer"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ninfer"
