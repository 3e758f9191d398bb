"""Errors as the APIs say them: one class inside, each protocol's body outside."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ninfer import errors

_log = logging.getLogger("ninfer.serve")


class ApiError(Exception):
    """A request that can't be served: HTTP `status`, OpenAI's error `type`, `code` and `param`.

    `extra` members go into the body beside them (`prompt_tokens`, `max_context`, Anthropic's `details`);
    `headers` are added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.type, self.code, self.param = type, code, param
        self.extra, self.headers = extra or {}, headers or {}

    @property
    def client_fault(self) -> bool:
        return self.status < 429


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def from_ninfer(error: errors.NInferError) -> ApiError:
    """What an expected error of the rooms below means to an HTTP client."""
    message = str(error)
    match error:
        case errors.ContextLengthError():
            return ApiError(400, message, param="messages", code="context_length_exceeded")
        case errors.ThinkingBudgetError():
            return ApiError(400, message, code="thinking_budget_capacity_insufficient")
        case errors.GrammarError():
            return ApiError(400, message, code="invalid_json_schema")
        case errors.FrontendError():
            return ApiError(400, message, param="messages", code="invalid_prompt")
        case errors.OverloadedError():
            return ApiError(
                429, message, type="rate_limit_error", code="server_overloaded", headers={"Retry-After": "1"}
            )
        case errors.QueueTimeoutError():
            return ApiError(503, message, type="server_error", code="request_queue_timeout")
        case errors.UnavailableError():
            return ApiError(503, message, type="server_error", code="service_unavailable")
        case errors.OptionError() | errors.CapacityError():
            return ApiError(400, message)
    return ApiError(500, message, type="internal_error", code="internal_error")


def as_api_error(error: BaseException) -> ApiError:
    """What any failure means to the client."""
    match error:
        case ApiError():
            return error
        case errors.NInferError():
            return from_ninfer(error)
        case asyncio.CancelledError():
            return ApiError(
                499, "The client went away.", type="request_cancelled", code="client_disconnected"
            )
    _log.error("internal error", exc_info=_without_text(error))
    return ApiError(500, "Internal error.", type="internal_error", code="internal_error")


def unavailable(message: str, retry_after: int | None = None) -> ApiError:
    """A 503, with the seconds after which asking again makes sense."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return ApiError(503, message, type="server_error", code="service_unavailable", headers=headers)


def _without_text(error: BaseException) -> BaseException:
    """The error for the log, without its message: that may quote a prompt."""
    return RuntimeError(type(error).__name__).with_traceback(error.__traceback__)


def openai_body(error: ApiError) -> dict[str, Any]:
    """The error body of the OpenAI APIs."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
            **error.extra,
        }
    }


_ANTHROPIC_STATUS = {429: 529}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_status(error: ApiError) -> int:
    """The status that the Messages API uses for the error."""
    if error.code == "request_queue_timeout":
        return 504
    return _ANTHROPIC_STATUS.get(error.status, error.status)


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """The error body of the Messages API."""
    status = anthropic_status(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message, **error.extra},
        "request_id": request_id,
    }
