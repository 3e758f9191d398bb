"""The request log: JSON lines of schema 27, appended by a thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from ninfer.errors import OptionError
from ninfer.frontend import Frontend
from ninfer.serve.errors import ApiError
from ninfer.serve.jobs import EngineInfo
from ninfer.serve.observe import records
from ninfer.serve.observe.background import Background
from ninfer.serve.observe.startup import Gpu, server_start
from ninfer.serve.observer import Outcome, RequestRecord
from ninfer.serve.options import ServeOptions

SCHEMA_VERSION = 27
_WAITING = 1 << 16
_logger = logging.getLogger("ninfer.serve.log")


class RequestLog:
    """An `Observer` that appends a line for each event and flushes it.

    Events take the loop microseconds; a thread makes lines of them, in their order. A write that fails, or a
    disk that falls 65,536 events behind, switches the log off with one error on the console.
    """

    def __init__(self, path: Path, options: ServeOptions, frontend: Frontend) -> None:
        """Opens the file; raises OptionError if that can't be."""
        self._options, self._frontend = options, frontend
        self._detail = options.speculation_detail_max_steps
        self._instance = f"serve-{os.getpid()}-{time.time_ns() // 1000}"
        self._file: int | None = _open(path, options.model_path)
        self._lagging = False
        self._background = Background("request-log", _WAITING)

    def server_start(self, info: EngineInfo, gpu: Gpu) -> None:
        self._event("server_start", lambda: server_start(self._options, info, self._frontend, gpu))

    def started(self, record: RequestRecord) -> None:
        request = records.request(record, self._options, self._frontend)
        seconds = records.preparation(record)
        self._event("request_start", lambda: {"request": request, "preparation_seconds": seconds})

    def rejected(self, record: RequestRecord, error: ApiError) -> None:
        line = {
            "phase": "prepare",
            "request": records.request(record, self._options, None),
            "error": records.rejection(record, error),
        }
        self._event("request_rejected", lambda: line)

    def failed(self, record: RequestRecord, error: ApiError) -> None:
        request = records.request(record, self._options, self._frontend)
        message = records.error_text(error)
        self._event("request_error", lambda: {"request": request, "error": {"message": message}})

    def done(self, record: RequestRecord, outcome: Outcome) -> None:
        request = records.request(record, self._options, self._frontend)
        self._event(
            "request_done",
            lambda: {
                "request": request,
                **records.completion(record, outcome, detail=self._detail),
            },
        )

    def response_failed(self, record: RequestRecord, phase: str, error: BaseException) -> None:
        """Only on the console."""

    def throughput(self, interval: dict[str, Any]) -> None:
        self._event("throughput", lambda: interval)

    def close(self) -> None:
        """Write what waits and close the file."""
        self._background.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _event(self, event: str, members: Callable[[], dict[str, Any]]) -> None:
        """`members` is called in the thread."""
        common = {
            "artifact_type": "ninfer_serve_request_log",
            "schema_version": SCHEMA_VERSION,
            "event": event,
            "timestamp_unix_ms": time.time_ns() // 1_000_000,
            "server_instance_id": self._instance,
        }
        if self._lagging or self._background.closed:
            return
        if self._background.submit(lambda: self._write(common, members)):
            return
        self._lagging = True
        _logger.error("request log disabled | writing is %d events behind", _WAITING)

    def _write(self, common: dict[str, Any], members: Callable[[], dict[str, Any]]) -> None:
        if self._file is None:
            return
        try:
            line = orjson.dumps({**common, **members()}, option=orjson.OPT_APPEND_NEWLINE)
            _write_all(self._file, line)
        except Exception as error:
            # The text of an OSError is the system's; that of anything else could hold values.
            words = error.strerror if isinstance(error, OSError) else None
            _logger.error("request log disabled | %s", words or type(error).__name__)
            os.close(self._file)
            self._file = None


def _open(path: Path, artifact: Path) -> int:
    if not path.parent.is_dir():
        raise OptionError(
            f"the request log {path} can't be opened: its folder doesn't exist; make it, or name another file"
        )
    same = path.exists() and artifact.exists() and path.samefile(artifact)
    if same or path.resolve() == artifact.resolve():
        raise OptionError(f"the request log must not be the model's file {path}; name another file")
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OptionError(f"the request log {path} can't be opened: {error.strerror}") from None
    if _ends_inside_line(path):
        os.write(file, b"\n")
    return file


def _ends_inside_line(path: Path) -> bool:
    """Has a writer died, or its disk been full, before the last line's end?"""
    try:
        if not path.is_file() or path.stat().st_size == 0:
            return False
        with path.open("rb") as old:
            old.seek(-1, os.SEEK_END)
            return old.read(1) != b"\n"
    except OSError:
        return False


def _write_all(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]
