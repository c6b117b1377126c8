"""OpenAI's requests as prompts for an engine, and completions as OpenAI's answers.

A field that is not here is refused by its name, so that nobody believes in an effect that it has not.
"""

from __future__ import annotations

import re
import secrets
import time
from threading import Lock
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from millrace.core.errors import DataError
from millrace.core.types import Finish, Sampling
from millrace.environments.tokenizer import encode_prompt
from millrace.evaluation.generate import Completion
from millrace.serve.shared_engine import SharedEngine

StopString = Annotated[str, Meta(min_length=1, max_length=256)]
_SEED_BITS = 62


class RefusedRequest(DataError):
    """A request that cannot be answered. `status`: of HTTP. `field`: of the request, if one is to blame."""

    def __init__(self, message: str, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field = status, field


class SampledRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request have. None: not given."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**_SEED_BITS), lt=2**_SEED_BITS)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatRequest(SampledRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class TextRequest(SampledRequest, kw_only=True):
    prompt: str


Request = TypeVar("Request", bound=SampledRequest)


class Completions:
    """Answers the bodies of requests. Any thread may call.

    Args:
        tokenizer: of the model, as transformers has it.
        model: its name in requests and answers.
    Raises, each answer: RefusedRequest; and as `SharedEngine.complete`.
    """

    def __init__(self, engine: SharedEngine, tokenizer: Any, *, model: str, max_sequence_tokens: int) -> None:
        self._engine, self._tokenizer, self._model = engine, tokenizer, model
        self._max_sequence_tokens = max_sequence_tokens
        self._tokenizing = Lock()  # a tokenizer of transformers may refuse a second thread
        self._since_s = int(time.time())

    def health(self) -> dict[str, Any]:
        return {"status": "ok", "requests": self._engine.num_requests}

    def models(self) -> dict[str, Any]:
        model = {"id": self._model, "object": "model", "created": self._since_s, "owned_by": "millrace"}
        return {"object": "list", "data": [model | {"max_model_len": self._max_sequence_tokens}]}

    def chat(self, body: bytes) -> dict[str, Any]:
        """The answer to `/v1/chat/completions`."""
        request = self._read(body, ChatRequest)
        if request.max_tokens is None:
            request.max_tokens = request.max_completion_tokens
        text, rest = self._complete(self._rendered(request.messages), request)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None}
        return self._answer("chat.completion", "chatcmpl", choice, rest)

    def text(self, body: bytes) -> dict[str, Any]:
        """The answer to `/v1/completions`."""
        request = self._read(body, TextRequest)
        text, rest = self._complete(request.prompt, request)
        return self._answer("text_completion", "cmpl", {"index": 0, "text": text, "logprobs": None}, rest)

    def _read(self, body: bytes, kind: type[Request]) -> Request:
        try:
            request = msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            named = re.search(r"\$\.(\w+)|field `(\w+)`", str(error))
            raise RefusedRequest(f"the request: {error}", field=named and (named[1] or named[2])) from error
        if request.stream:
            raise RefusedRequest("`stream` is not supported: leave it out", field="stream")
        if request.model not in (None, self._model):
            message = f"the model {request.model!r} is not served here: this is {self._model!r}"
            raise RefusedRequest(message, 404, "model")
        return request

    def _rendered(self, messages: list[ChatMessage]) -> str:
        """Without a chat template: the texts, with a blank line after each."""
        if not getattr(self._tokenizer, "chat_template", None):
            return "".join(f"{one.content}\n\n" for one in messages)
        try:
            rendered = self._tokenizer.apply_chat_template(
                msgspec.to_builtins(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what it likes
            message = f"the chat template refuses the messages: {type(error).__name__}: {error}"
            raise RefusedRequest(message, field="messages") from error
        return str(rendered)

    def _complete(self, prompt: str, request: SampledRequest) -> tuple[str, dict[str, Any]]:
        """The text of the completion; the reason of its end, and the numbers of tokens."""
        with self._tokenizing:
            tokens = encode_prompt(self._tokenizer, prompt)
        room = self._max_sequence_tokens - len(tokens)
        if not tokens or room < 1:
            raise RefusedRequest(
                f"the prompt has {len(tokens)} tokens: it must have 1 to {self._max_sequence_tokens - 1}, "
                "one less than `--max-sequence-tokens`"
            )
        sampling = _sampling(request, room)
        seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        completion = self._engine.complete(tokens, sampling, seed if sampling.temperature else 0)
        num_prompt, num_sampled = len(tokens), len(completion.tokens)
        return self._text(completion, sampling.stop), {
            "finish_reason": "stop" if completion.finish is Finish.STOP else "length",
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_sampled,
                "total_tokens": num_prompt + num_sampled,
            },
        }

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
    return Sampling(
        max_tokens=min(request.max_tokens or room, room),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=request.top_p or 1.0,
        stop=stop,
        token_masks=False,
    )
