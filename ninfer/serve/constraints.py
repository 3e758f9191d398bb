"""What of a request is enforced in sampling: a grammar for the answer, or none."""

from __future__ import annotations

from ninfer.errors import GrammarError
from ninfer.frontend import grammar
from ninfer.serve.calls import GenerationRequest
from ninfer.serve.errors import ApiError


def constraint_for(request: GenerationRequest) -> str | None:
    """The grammar of the answer behind its thinking block; None if anything may come.

    Tool choice, strict tools and the response format are enforced together. Raises `ApiError` for a schema
    that can't be.
    """
    form, choice = request.response_format, request.tool_choice
    schema = whole = None
    if form is not None:
        schema = grammar.ANY_OBJECT if form.schema is None else form.schema
        try:
            whole = grammar.json_schema(schema)
        except GrammarError as error:
            raise ApiError(400, str(error), param="response_format", code="invalid_json_schema") from error
    if not request.tools or (choice.mode == "none" and whole is not None):
        return whole
    try:
        return grammar.tool_calls(
            [tool.declared() for tool in request.tools],
            choice.mode,
            names=choice.names,
            strict=[tool.name for tool in request.tools if tool.strict],
            parallel=request.parallel_calls,
            schema=schema,
        )
    except GrammarError as error:
        raise ApiError(400, str(error), param="tools", code="invalid_function_parameters") from error
