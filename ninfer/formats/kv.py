"""What a number in the KV cache is: the names and sizes of the formats; their codecs are in `kv_codec`."""

from __future__ import annotations

from enum import StrEnum


class KvFormat(StrEnum):
    """Storage of keys and values; the values are the words of options and reports.

    BF16 keeps the activation type (float32 in tests); the others are quantized per vector of a head.
    """

    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    K8V4 = "k8v4"
