"""Every error that NInfer raises on purpose.

An error is raised where the fact is known, as one sentence naming the cause, the value, the limit and
the remedy. Programs turn it into an exit code or a response body in exactly one place; anything that is
not an `NInferError` is a defect of ours and keeps its traceback.
"""


class NInferError(Exception):
    """Base of all expected errors; `str(error)` is the sentence shown to the user."""


class OptionError(NInferError):
    """A command-line or API option is unknown, malformed, out of range or in conflict."""


class FormatError(NInferError):
    """Numbers cannot be encoded or decoded as asked (unknown format, bad shape, non-finite value)."""


class ArtifactError(NInferError):
    """A `.ninfer` file is missing, damaged or breaks a rule of the container."""


class ConversionError(NInferError):
    """A source checkpoint or a recipe cannot be turned into an artifact."""


class ModelError(NInferError):
    """An artifact is a valid container, but not a model that this version can run."""


class CapacityError(NInferError):
    """A request or a plan does not fit the configured memory or context."""


class ContextLengthError(CapacityError):
    """A prompt is longer than the context. `tokens`: how many it has at least, where that was counted."""

    def __init__(self, message: str, tokens: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens


class ThinkingBudgetError(CapacityError):
    """A thinking budget leaves no room for its closing text and an answer."""


class EngineError(NInferError):
    """An engine is used in a way it can't serve."""


class UnavailableError(EngineError):
    """The engine was closed or has failed; no request can be served any more."""


class OverloadedError(EngineError):
    """The queue of waiting requests is full; the request may be sent again later."""


class QueueTimeoutError(EngineError):
    """A request waited longer for its turn than it was allowed to."""


class FrontendError(NInferError):
    """Tokenizer, chat template or messages cannot be used as given."""


class GrammarError(FrontendError):
    """A JSON schema or a grammar cannot be enforced in sampling."""
