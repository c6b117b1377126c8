"""OpenAI's requests as prompts for an engine, and completions as OpenAI's answers.

A field that is not here is refused by its name, so that nobody believes in an effect that it has not.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from millrace.conversations.conversation_text import ConversationText
from millrace.conversations.encoding import encodable
from millrace.conversations.tokenizer import encode, encode_prompt
from millrace.core.errors import DataError, DeadlineExceeded, WorkerError
from millrace.core.types import Finish, Sampling
from millrace.episodes.gateway.calls import RefusedCall
from millrace.evaluation.generate import Completion
from millrace.serve.shared_engine import EngineFailed, EngineFull, SharedEngine

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TEMPERATURE_MIN = 0.01
"""As in training. Smaller ones divide logits beyond the numbers of a float, and mean 0."""
FULL_S = 5
"""In this time some of the requests that run or wait are answered."""
_SEED_BITS = 62
_CHARACTERS_A_TOKEN = 8
"""Text seldom has more. A first part of a text with so many shows mostly whether the text is too long."""


class SampledRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request have. None: not given."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0.01, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**_SEED_BITS), lt=2**_SEED_BITS)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`reasoning_content`: of the assistant."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None
    name: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        content = self.content
        return "".join(one.text for one in content) if isinstance(content, list) else content or ""


class ChatRequest(SampledRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class TextRequest(SampledRequest, kw_only=True):
    prompt: str


Request = TypeVar("Request", bound=SampledRequest)
Value = TypeVar("Value")
Answering = Callable[[str, dict[str, Any]], dict[str, Any]]


class Completions:
    """Answers the bodies of requests. Any thread may call.

    Args:
        tokenizer: of the model, as transformers has it.
        model: its name in requests and answers.
    Raises, each answer: RefusedCall, when the answer is asked for or by its future.
    """

    def __init__(self, engine: SharedEngine, tokenizer: Any, *, model: str, max_sequence_tokens: int) -> None:
        self._engine, self._tokenizer, self._model = engine, tokenizer, model
        self._max_sequence_tokens = max_sequence_tokens
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._tokenizing = Lock()  # a tokenizer of transformers may refuse a second thread
        self._since_s = int(time.time())

    def health(self) -> dict[str, Any]:
        return {"status": "ok", "requests": self._engine.num_requests}

    def models(self) -> dict[str, Any]:
        model = {"id": self._model, "object": "model", "created": self._since_s, "owned_by": "millrace"}
        return {"object": "list", "data": [model | {"max_model_len": self._max_sequence_tokens}]}

    def chat(self, body: bytes) -> Future[dict[str, Any]]:
        """The answer to `/v1/chat/completions`."""
        request = self._read(body, ChatRequest)
        if request.max_tokens is None:
            request.max_tokens = request.max_completion_tokens

        def answer(text: str, rest: dict[str, Any]) -> dict[str, Any]:
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "logprobs": None}
            return self._answer("chat.completion", "chatcmpl", choice, rest)

        return self._complete(self._rendered(request.messages), request, answer)

    def text(self, body: bytes) -> Future[dict[str, Any]]:
        """The answer to `/v1/completions`."""
        request = self._read(body, TextRequest)

        def answer(text: str, rest: dict[str, Any]) -> dict[str, Any]:
            choice = {"index": 0, "text": text, "logprobs": None}
            return self._answer("text_completion", "cmpl", choice, rest)

        return self._complete(self._ids(request.prompt, encode_prompt), request, answer)

    def _read(self, body: bytes, kind: type[Request]) -> Request:
        try:
            request = msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            named = re.search(r"\$\.(\w+)|field `(\w+)`", str(error))
            raise RefusedCall(f"the request: {error}", field=named and (named[1] or named[2])) from error
        if request.stream:
            raise RefusedCall("`stream` is not supported: leave it out", field="stream")
        if request.model not in (None, self._model):
            message = f"the model {request.model!r} is not served here: this is {self._model!r}"
            raise RefusedCall(message, 404, "model")
        return request

    def _rendered(self, messages: list[ChatMessage]) -> list[int]:
        """The ids of a chat: the special tokens are the template's alone, as in training. Without a chat
        template: the texts, with a blank line after each."""
        if not getattr(self._tokenizer, "chat_template", None):
            return self._ids("".join(f"{one.text}\n\n" for one in messages), encode_prompt)
        try:
            plain = [{**msgspec.to_builtins(one), "content": one.text} for one in messages]
            rendered = ConversationText(self._tokenizer, {}).checked(plain)
        except DataError as error:
            raise RefusedCall(str(error), field="messages") from error
        return self._ids(rendered, encode)

    def _ids(self, text: str, encoder: Callable[[Any, str], list[int]]) -> list[int]:
        """A text that is too long is mostly refused by its first part: a tokenizer takes seconds for some
        megabytes, and other requests wait meanwhile."""
        most, part = self._max_sequence_tokens - 1, _CHARACTERS_A_TOKEN * self._max_sequence_tokens
        tokens = self._encoded(text[:part], encoder)
        while (
            part < len(text) and len(tokens) <= most + self._longest_token
        ):  # a cut token is so many at most
            part *= 2
            tokens = self._encoded(text[:part], encoder)
        if not 1 <= len(tokens) <= most:
            of = "more than " if part < len(text) else ""
            raise RefusedCall(
                f"the prompt has {of}{len(tokens)} tokens: it must have 1 to {most}, one less than "
                "`--max-sequence-tokens`"
            )
        return tokens

    def _encoded(self, text: str, encoder: Callable[[Any, str], list[int]]) -> list[int]:
        with self._tokenizing:
            return encoder(self._tokenizer, encodable(text))

    def _complete(
        self,
        tokens: list[int],
        request: SampledRequest,
        answer: Answering,
    ) -> Future[dict[str, Any]]:
        """`answer`: of the text of the completion; the reason of its end, and the numbers of tokens."""
        sampling = _sampling(request, self._max_sequence_tokens - len(tokens))
        seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        with _refusing():
            completion = self._engine.submit(tokens, sampling, seed if sampling.temperature else 0)
        return then(completion, partial(self._answered, len(tokens), sampling.stop, answer))

    def _answered(
        self,
        num_prompt: int,
        stop: tuple[str, ...],
        answer: Answering,
        done: Future[Completion],
    ) -> dict[str, Any]:
        with _refusing():
            completion = done.result()
        num_sampled = len(completion.tokens)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }
        reason = "stop" if completion.finish is Finish.STOP else "length"
        return answer(self._text(completion, stop), {"finish_reason": reason, "usage": usage})

    def _text(self, completion: Completion, stop: tuple[str, ...]) -> str:
        """Up to the first stop string, as OpenAI has it."""
        with self._tokenizing:
            text = self._tokenizer.decode(
                completion.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return str(text[: min((at for one in stop if (at := text.find(one)) >= 0), default=None)])

    def _answer(self, kind: str, prefix: str, choice: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice | {"finish_reason": rest["finish_reason"]}],
            "usage": rest["usage"],
        }


def _sampling(request: SampledRequest, room: int) -> Sampling:
    """`room`: tokens that fit behind the prompt."""
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    temperature = 1.0 if request.temperature is None else request.temperature
    if 0 < temperature < TEMPERATURE_MIN:
        message = f"the request: `temperature` ({temperature:g}) must be 0, or {TEMPERATURE_MIN} to 2"
        raise RefusedCall(message, field="temperature")
    return Sampling(
        max_tokens=min(request.max_tokens or room, room),
        temperature=temperature,
        top_p=request.top_p or 1.0,
        stop=stop,
        token_masks=False,
    )


@contextmanager
def _refusing() -> Iterator[None]:
    """What the engine raises, as a refusal with a status of HTTP. Only a full engine answers a retry."""
    try:
        yield
    except EngineFull as error:
        raise RefusedCall(str(error), 503, retry_after_s=FULL_S) from error
    except DeadlineExceeded as error:
        raise RefusedCall(str(error), 504) from error
    except EngineFailed as error:
        raise RefusedCall(str(error), 500) from error
    except WorkerError as error:
        raise RefusedCall(str(error), 503) from error


def then(future: Future[Completion], function: Callable[[Future[Completion]], Value]) -> Future[Value]:
    """The value, or the error, of a function of `future` after its end."""
    value: Future[Value] = Future()

    def settle(done: Future[Completion]) -> None:
        try:
            value.set_result(function(done))
        except Exception as error:
            value.set_exception(error)

    future.add_done_callback(settle)
    return value
