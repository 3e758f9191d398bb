"""What a number is: the codecs of every weight format.

`get(name)` looks a format up without importing PyTorch. `encode` turns a float32 matrix `[rows, K]` into its
natural `Planes`, `decode` turns them back into float32; both need PyTorch, which is imported on first use.

How planes lie in a file is not known here but in `ninfer.artifact.layouts`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ninfer.formats.kv import KvCode, KvFormat, KvSide
from ninfer.formats.planes import Planes
from ninfer.formats.registry import Format, get, names

if TYPE_CHECKING:
    from ninfer.formats.codec import decode, encode
    from ninfer.formats.nvfp4 import divisor as nvfp4_divisor

__all__ = [
    "Format",
    "KvCode",
    "KvFormat",
    "KvSide",
    "Planes",
    "decode",
    "encode",
    "get",
    "names",
    "nvfp4_divisor",
]

_LAZY = {"encode": ("codec", "encode"), "decode": ("codec", "decode"), "nvfp4_divisor": ("nvfp4", "divisor")}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(f"ninfer.formats.{module}"), attribute)
    raise AttributeError(f"module 'ninfer.formats' has no attribute {name!r}")
