"""HTTP's framing: uvicorn's, with a bound on what it keeps before anybody has looked for a key."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST = 1 << 20
"""Bytes of a request's line and headers, or of trailers, before the client is sent away."""


class BoundedProtocol(HttpToolsProtocol):
    """The class for `uvicorn.Config`'s `http`."""

    _unfinished = 0
    """Bytes since the last that belonged to a body or completed something: they are all in memory."""

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > _MOST and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished = 0
        super().on_message_complete()
