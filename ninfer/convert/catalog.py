"""All parameters in all sources: the one place that opens a parameter's matrix, once."""

from __future__ import annotations

from collections.abc import Mapping

from ninfer import formats
from ninfer.convert.parameters import Parameter
from ninfer.convert.source import Source, SourceMatrix, is_whole_tiles
from ninfer.convert.views import Rows, View
from ninfer.errors import ConversionError


class Catalog:
    """`views`: source name -> parameter name -> view. Matrices are opened (headers only) on first need."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        sources: Mapping[str, Source],
        views: Mapping[str, Mapping[str, View]],
    ) -> None:
        self.parameters = parameters
        self.sources = sources
        self._views = views
        self._matrices: dict[tuple[str, str], SourceMatrix] = {}

    def view(self, name: str, source: str) -> View:
        """The view of a parameter in a source."""
        found = self._views.get(source, {}).get(name)
        if found is None:
            raise ConversionError(f"the source '{source}' does not hold '{name}'")
        return found

    def holds(self, name: str, source: str) -> bool:
        """Whether a source has the parameter at all; additional ones may lack the head and the MTP layer."""
        return name in self._views.get(source, {})

    def matrix(self, name: str, source: str) -> SourceMatrix:
        """The source matrix of which the parameter is a selection."""
        view = self.view(name, source)
        if not isinstance(view, Rows):
            raise ConversionError(f"'{name}' is a direct tensor; it cannot be imported in an encoded form")
        key = (source, view.tensor)
        if key not in self._matrices:
            self._matrices[key] = view.open(self.sources[source])
        return self._matrices[key]

    def stored(self, name: str, source: str) -> str:
        """Format in which the source holds the parameter; a direct tensor counts as its own format."""
        if isinstance(self.view(name, source), Rows):
            return self.matrix(name, source).stored
        return self.parameters[name].format

    def import_obstacle(self, name: str, source: str) -> str | None:
        """Why the stored codes of a parameter cannot be taken over, or None if they can."""
        view = self.view(name, source)
        if not isinstance(view, Rows):
            return "a direct tensor has no codes"
        matrix = self.matrix(name, source)
        if formats.get(matrix.stored).kind == "tile_float" and not is_whole_tiles(view.take(0, view.count)):
            return f"its rows are no whole 128x128 blocks of '{view.tensor}'"
        return None

    def input_divisor(self, name: str, source: str) -> float | None:
        """Activation divisor that came with an NVFP4 matrix."""
        if isinstance(self.view(name, source), Rows):
            return self.matrix(name, source).input_divisor
        return None
