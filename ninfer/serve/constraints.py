"""What of a request is enforced in sampling: a grammar for the answer, or none."""

from __future__ import annotations

from ninfer.errors import GrammarError
from ninfer.frontend import Frontend
from ninfer.frontend.grammar import ANY_OBJECT, json_schema
from ninfer.serve.calls import GenerationRequest
from ninfer.serve.errors import ApiError
from ninfer.serve.toolcalls import callable_tools


def constraint_for(request: GenerationRequest, frontend: Frontend) -> str | None:
    """The Lark grammar of the answer behind its thinking block; None if anything may come.

    Takes milliseconds for large schemas. Raises `ApiError` for one that can't be enforced.
    """
    schema = None
    if request.response_format is not None:
        schema = ANY_OBJECT if request.response_format.schema is None else request.response_format.schema
    param = "response_format"
    try:
        if request.tool_choice.mode == "none" or not request.tools:
            if schema is not None:
                return json_schema(schema)
            return frontend.tool_grammar([], "none") if request.tools else None
        callable_now = callable_tools(request)
        if schema is not None:
            json_schema(schema)  # so that an error names the right field
        param = "tools"
        return frontend.tool_grammar(
            [tool.declared() for tool in request.tools],
            request.tool_choice.mode,
            names=[tool.name for tool in callable_now],
            strict=[tool.name for tool in callable_now if tool.strict],
            parallel=request.parallel_calls,
            schema=schema if request.tool_choice.mode == "auto" else None,
        )
    except GrammarError as error:
        raise ApiError(400, str(error), param=param, code="invalid_schema") from None
