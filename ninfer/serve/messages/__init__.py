"""The Anthropic Messages API."""

from ninfer.serve.messages.routes import router

__all__ = ["router"]
