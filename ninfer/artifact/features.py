"""No object mixes data of features that can be left out independently of each other."""

from __future__ import annotations

from collections import defaultdict

from ninfer.artifact.records import Directory
from ninfer.artifact.strict_json import show
from ninfer.errors import ArtifactError

FEATURES = frozenset({"text", "vision", "mtp", "dflash", "dflash2", "proposal"})


def check_features(directory: Directory) -> None:
    """Refuse an object in which two features each have elements that the other hasn't.

    Sharing is fine: then one feature's elements contain the other's, and leaving either out leaves no private
    bytes behind in a parent that is still needed.
    """
    ranges: dict[str, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for name, binding in directory.bindings.items():
        feature = name.partition("/")[0]
        if feature in FEATURES:
            for part in binding:
                ranges[part.object][feature].append((part.begin, part.end))
    for identifier, features in ranges.items():
        if len(features) > 1:
            merged = {feature: _merge(found) for feature, found in features.items()}
            everything = _merge([interval for found in merged.values() for interval in found])
            if everything not in merged.values():
                raise ArtifactError(
                    f"object {show(identifier)} mixes private data of {', '.join(sorted(features))}, "
                    f"which can be left out independently; each needs an object of its own"
                )


def _merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
