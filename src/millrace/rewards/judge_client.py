"""Asks an OpenAI-compatible server for one judgement: rate, concurrency, deadlines and retries."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import httpx2

from millrace.config.tables.reward_kinds import JudgeRewardSection
from millrace.core.errors import ConfigError, RewardError
from millrace.rewards.pauses import PAUSE_S_MAX, pauses_s

RETRIED = frozenset({408, 409, 425, 429})
"""Statuses after which the same request may succeed, beside those from 500 on."""
REASON_CHARACTERS = 120


class JudgeClient:
    """A client of one judge, for one event loop.

    Args:
        workers: reward workers of the run, which share `concurrency` and `requests_per_s`.
    Raises:
        ConfigError: the environment has not the variable with the API key.
    """

    def __init__(self, config: JudgeRewardSection, workers: int) -> None:
        self._config, self._key = config, _api_key(config.api_key_env)
        self._slots = asyncio.Semaphore(max(1, config.concurrency // workers))
        self._rate = RequestRate(workers / config.requests_per_s if config.requests_per_s else 0.0)
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # `asyncio.timeout` is the deadline: that of httpx2 begins again with each byte.
        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False)

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The request for an answer to these messages."""
        config = self._config
        return {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }

    async def ask(
        self, body: dict[str, Any], read: Callable[[str], float | None], key: str, attempts: int
    ) -> tuple[float, int]:
        """The judgement that `read` finds in an answer, and how many requests it took.

        `key` identifies the question. The jitter of the pauses depends on it alone.

        Raises: RewardError: no answer had a judgement, or the server refuses the request.
        """
        content, asked_s, reason = json.dumps(body).encode(), 0.0, ""
        for attempt, backoff_s in enumerate([0.0, *pauses_s(key, attempts, self._config.backoff_s)], 1):
            await asyncio.sleep(min(max(backoff_s, asked_s), PAUSE_S_MAX))
            value, reason, asked_s = await self._attempt(content, read)
            if value is not None:
                return value, attempt
        raise RewardError(self._without_key(f"no judgement after {attempts} attempts: {reason}"))

    async def _attempt(
        self, content: bytes, read: Callable[[str], float | None]
    ) -> tuple[float | None, str, float]:
        """The judgement, or None, the reason, and the pause in seconds that the server asks for."""
        async with self._slots:
            await asyncio.sleep(self._rate.delay_s(asyncio.get_running_loop().time()))
            try:
                async with asyncio.timeout(self._config.request_timeout_s):
                    answer = await self._http.post(f"{self._config.url}/chat/completions", content=content)
            except TimeoutError:
                return None, f"no answer within {self._config.request_timeout_s:g} s", 0.0
            except httpx2.HTTPError as error:
                return None, f"{type(error).__name__}: {error}", 0.0
        if answer.status_code in RETRIED or answer.status_code >= 500:
            return None, _of_status(answer), _seconds(answer.headers.get("Retry-After"))
        if not answer.is_success:
            raise RewardError(self._without_key(f"the judge refuses the request: {_of_status(answer)}"))
        text, reason = _content(answer)
        value = None if reason else read(text)
        return value, reason or f"malformed answer, which ends with {text[-REASON_CHARACTERS:]!r}", 0.0

    def _without_key(self, text: str) -> str:
        """A server may repeat the key in its error."""
        return text.replace(self._key, "***") if self._key else text


class RequestRate:
    """Spreads requests: at least `interval_s` lies between the beginnings of two."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._next_s = interval_s, 0.0

    def delay_s(self, now_s: float) -> float:
        """How long the next request has to wait. It takes its turn."""
        begin_s = max(now_s, self._next_s)
        self._next_s = begin_s + self._interval_s
        return begin_s - now_s


def _api_key(variable: str | None) -> str:
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(
            f"`reward.api_key_env` names {variable}, and the environment has no such variable here.\n"
            f"  Export {variable} before the run starts, on every host with reward workers"
        )
    return key


def _content(answer: httpx2.Response) -> tuple[str, str]:
    """The text of an answer, or why it has none that counts."""
    try:
        choice = answer.json()["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        text, refusal = message["content"], message.get("refusal")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError, AttributeError):
        return "", f"no chat completion: {answer.text[:REASON_CHARACTERS]!r}"
    if refusal or not isinstance(text, str):
        return "", f"the judge refuses: {str(refusal or text)[:REASON_CHARACTERS]!r}"
    if finish not in ("stop", None):
        return "", f"the answer ended with {finish!r}: see `reward.max_tokens`"
    return text, ""


def _of_status(answer: httpx2.Response) -> str:
    return f"{answer.status_code} {answer.text[:REASON_CHARACTERS]!r}"


def _seconds(retry_after: str | None) -> float:
    """The pause of a header `Retry-After` in seconds; 0 without one, or with a date."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
