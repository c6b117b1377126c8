"""Which dialect answers at which path."""

from __future__ import annotations

from millrace.environments.gateway.dialects.anthropic_messages import MessagesDialect
from millrace.environments.gateway.dialects.chat import ChatDialect
from millrace.environments.gateway.dialects.dialect import GatewayDialect
from millrace.environments.gateway.dialects.generate import GenerateDialect
from millrace.environments.gateway.dialects.responses import ResponsesDialect
from millrace.environments.gateway.dialects.text import TextDialect

MESSAGES = MessagesDialect()
DIALECTS: dict[str, GatewayDialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": TextDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": GenerateDialect(),
}
COUNT_TOKENS = "/v1/messages/count_tokens"
"""Answered by `MESSAGES.read_count` and `MESSAGES.counted`. A count is no turn."""
