"""The OpenAI Responses API: create (whole or streamed), fetch, continue, list, delete, count."""

from ninfer.serve.responses.routes import router

__all__ = ["router"]
