"""The frontend of one model: conversations to tokens, tokens to text."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ninfer.errors import ContextLengthError, FrontendError
from ninfer.frontend.constraint import Constraint, Grammars
from ninfer.frontend.marks import find_marks
from ninfer.frontend.messages import Message, check_messages
from ninfer.frontend.options import template_variables
from ninfer.frontend.presets import LLAMA, SamplingPreset, sampling_preset
from ninfer.frontend.resources import read_resources
from ninfer.frontend.session import OutputSession
from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.thinking import EARLY_CLOSE, ends_inside_thinking
from ninfer.frontend.tokenizer import Tokenizer

_MAX_STOP_ID = 2**31 - 1
# Appended to a message that is to be continued, to find its end in the rendered prompt: a noncharacter,
# then a space, which only a template that trims its messages removes.
_CUT = "\ufdd0"
_LONG = 4 << 20
_LONG_PER_TOKEN = 16
# A text of so many characters, and so many for each token that is allowed, is looked at before it is encoded.


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation: token ids, text, and what the engine and the output session must know of it.

    starts_in_thinking: whether the answer starts inside a thinking block.
    declares_tools: whether tools were given, so that the answer may call them.

    Marks, as offsets in `tokens`, at which another prompt of the conversation may branch off (see `marks`):

    boundaries: where a message begins, ascending, including the header that opens the answer.
    preamble: where the first message after the leading system and developer messages and the tools begins;
        None if the prompt doesn't start with those, or nothing follows.
    opener: where the generation prompt begins; None without one.
    """

    tokens: list[int]
    text: str
    starts_in_thinking: bool
    declares_tools: bool = False
    boundaries: tuple[int, ...] = ()
    preamble: int | None = None
    opener: int | None = None


class Frontend:
    """Tokenizer, chat template and output rules of one model. Immutable, safe to use from many threads."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, architecture: str,
        stop_token_ids: tuple[int, ...], special_tokens: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Use `from_resources`."""
        self.architecture = architecture
        self.stop_token_ids = stop_token_ids
        self.public_tokens = tokenizer.public_tokens
        self.bos_token_id = tokenizer.control_id(special_tokens.get("bos_token", ""))
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._grammars = Grammars(tokenizer, stop_token_ids)

    @classmethod
    def from_resources(
        cls,
        resources: Mapping[str, bytes],
        *,
        architecture: str,
        vocab_rows: int,
        chat_template: str | None = None,
    ) -> "Frontend":
        """Build from an artifact's text resources (role to bytes).

        `architecture` is the model's name in its config, `vocab_rows` the rows of its embedding;
        `chat_template` is the source of a Jinja template to use instead of the artifact's. Raises
        FrontendError for a missing or malformed resource, a tokenizer of another kind, or a template that
        doesn't compile.
        """
        sampling_preset(architecture, thinking=False)  # refuses unknown architectures
        qwen = architecture != LLAMA
        with _collector_paused():
            read = read_resources(resources, qwen=qwen, vocab_rows=vocab_rows)
            return cls(
                Tokenizer(read, qwen=qwen),
                ChatTemplate(read.template if chat_template is None else chat_template),
                architecture=architecture,
                stop_token_ids=read.stop_token_ids,
                special_tokens=read.special_tokens,
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
        preserve_thinking: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> Prompt:
        """The prompt of a conversation.

        Options left at None are the template's to decide, except `add_generation_prompt`: on, unless the
        final assistant message is to be continued. Raises FrontendError if messages or options break a rule
        (see `messages`, `options`) or the template refuses them; ContextLengthError early, which may save
        minutes and gigabytes, if a prompt has far more than `most_tokens`.
        """
        checked = check_messages(messages)
        final = ""
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message:
            if add_generation_prompt:
                raise FrontendError("A prompt cannot both continue the final message and start a new answer.")
            final = _mark_final(checked)
        variables = template_variables(
            checked,
            tools=tools,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            preserve_thinking=preserve_thinking,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            special_tokens=self._special_tokens,
        )
        text = self._template.render(variables)
        if continue_final_message:
            text = _cut_final(text, final)
        if most_tokens is not None:
            self._refuse_hopeless(str.__str__(text), most_tokens)
        tokens, controls = self._tokenizer.encode_marked(text)
        marks = find_marks(text, controls, generation_prompt=add_generation_prompt)
        return Prompt(
            tokens,
            str.__str__(text),
            ends_inside_thinking(text),
            bool(tools),
            marks.boundaries,
            marks.preamble,
            marks.opener,
        )

    def _refuse_hopeless(self, text: str, most: int) -> None:
        """Counting in pieces changes tokens near the cuts only: twice as many leave no doubt."""
        if len(text) <= max(_LONG, _LONG_PER_TOKEN * most):
            return
        tokens = self._tokenizer.count_until(text, 2 * most)
        if tokens > 2 * most:
            raise ContextLengthError(
                f"The prompt of {len(text)} characters has more than {tokens} tokens; at most {most} fit.",
                tokens,
            )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, in which spellings of control tokens are text. Raises FrontendError."""
        return self._tokenizer.encode(str.__str__(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each of many plain texts, as by `encode`, on all cores. Raises FrontendError."""
        return self._tokenizer.encode_batch(texts)

    def decode(self, tokens: Iterable[int], *, keep_special: bool = False) -> str:
        """The text of `tokens`, special tokens left out unless asked for. Raises FrontendError."""
        return self._tokenizer.decode(tokens, keep_special=keep_special)

    def preset(self, *, thinking: bool) -> SamplingPreset:
        """Sampling defaults; `thinking` is the prompt's `starts_in_thinking`."""
        return sampling_preset(self.architecture, thinking=thinking)

    def session(
        self,
        prompt: Prompt,
        *,
        stop: Sequence[str] = (),
        reasoning_stop: Sequence[str] = (),
        stop_token_ids: Iterable[int] = (),
        ignore_model_stops: bool = False,
        raw: bool = False,
        thinking_budget: int | None = None,
        grammar: str | None = None,
        single_call: bool = False,
        constraint: Constraint | None = None,
    ) -> OutputSession:
        """The output of one request for `prompt`.

        `stop` and `reasoning_stop` are strings that end the answer in their channel; `stop_token_ids` are
        added to the model's own, which `ignore_model_stops` drops. `raw` publishes special tokens too and
        doesn't split channels. `thinking_budget` (tokens, at least 1) has no effect on a prompt that doesn't
        start in thinking. Tool calls have their own channel if the prompt declares tools.
        `grammar` (see module `grammar`) is what the answer must follow from its beginning or the end of the
        thinking block on; compiling one may take some milliseconds, the first also builds a table of all
        tokens.
        `constraint` is one of the caller's own instead. `single_call` ends the output behind the first tool
        call. Raises FrontendError for an empty stop string, a bad id or a bad budget, and GrammarError.
        """
        for name, strings in (("stop", stop), ("reasoning stop", reasoning_stop)):
            if isinstance(strings, str) or not all(isinstance(s, str) and s for s in strings):
                raise FrontendError(f"Every {name} string must be non-empty text.")
        ids = set() if ignore_model_stops else set(self.stop_token_ids)
        for token_id in stop_token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id <= _MAX_STOP_ID:
                raise FrontendError(f"The stop token id {token_id!r} is no integer in 0..{_MAX_STOP_ID}.")
            ids.add(token_id)
        if thinking_budget is not None and thinking_budget < 1:
            raise FrontendError(f"The thinking budget must be at least 1 token, not {thinking_budget}.")
        if grammar is not None:
            if constraint is not None:
                raise FrontendError("A grammar and a constraint exclude each other; give one of them.")
            if ignore_model_stops:
                raise FrontendError("A grammar needs the model's stop tokens; don't ignore them.")
            constraint = self._grammars.constraint(grammar, ids)
        return OutputSession(
            self._tokenizer,
            starts_in_thinking=prompt.starts_in_thinking,
            stop=tuple(stop),
            reasoning_stop=tuple(reasoning_stop),
            stop_token_ids=ids,
            raw=raw,
            calls=prompt.declares_tools,
            thinking_budget=thinking_budget,
            closer=self.thinking_closer,
            constraint=constraint,
            single_call=single_call,
        )

    def prepare_grammars(self) -> None:
        """Build now what the first session with a grammar would build: a table of all tokens."""
        self._grammars.prepare()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token's text, maybe only a part of a character. Raises FrontendError."""
        return self._tokenizer.token_bytes(token_id)

    @cached_property
    def thinking_closer(self) -> tuple[int, ...]:
        """The tokens that close the thinking block when its budget is used up."""
        return tuple(self._tokenizer.encode(EARLY_CLOSE))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic collection meanwhile: the merges are up to 250,000 short-lived pairs, whose allocation would
    make the collector walk all of an imported torch again and again (half of the start, measured)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _mark_final(messages: list[Message]) -> str:
    final = messages[-1]
    if final["role"] != "assistant" or final.get("tool_calls"):
        raise FrontendError("Only a final assistant message without tool calls can be continued.")
    if any(_CUT in message["content"] for message in messages):
        raise FrontendError("Messages to be continued may not contain the noncharacter U+FDD0.")
    content = final["content"]
    final["content"] = content + _CUT + " "
    return content


def _cut_final(text: str, content: str) -> str:
    at = text.rfind(_CUT)
    if at < 0:
        raise FrontendError("The chat template does not print the final message, so it cannot be continued.")
    trimmed = text[at + 1 : at + 2] != " " and content.strip() != ""
    return text[: at - (len(content) - len(content.rstrip()) if trimmed else 0)]
