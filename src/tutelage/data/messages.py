"""Chat messages: what people, models and tools say in a conversation.

    Message("user", "What is 6 times 7?")
    Message("assistant", "", tool_calls=(ToolCall("calculator", '{"expression": "6 * 7"}', "call_1"),))
    Message("tool", "42", tool_call_id="call_1")
    Message("user", ("What is this?", Image("9f2c…")))

Messages are values: they compare equal by content and can be keys of a dict.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class Image(NamedTuple):
    """A picture in a message, by reference."""

    media: str
    """content hash, by which the run's media store has the picture"""


class ToolCall(NamedTuple):
    """A model's request to call a tool."""

    name: str
    arguments: str = "{}"
    """a JSON object, as text: the model's own, so it need not be valid"""
    id: str = ""
    """names the call in the message with its result"""

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments as a dict; None if they are not a JSON object."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


Part = str | Image
"""A piece of text, or a picture."""


class Message(NamedTuple):
    """One chat message."""

    role: str
    """one of ROLES"""
    content: str | tuple[Part, ...] = ""
    """text, or text and pictures in order"""
    reasoning: str = ""
    """what the assistant thought before it answered, without the marks around it"""
    tool_calls: tuple[ToolCall, ...] = ()
    """calls that the assistant makes"""
    tool_call_id: str = ""
    """the call that a tool's message answers"""
    name: str = ""
    """who speaks: the tool, or one of several users"""

    @property
    def text(self) -> str:
        """The text, without pictures."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """The pictures in order."""
        return () if isinstance(self.content, str) else tuple(p for p in self.content if isinstance(p, Image))

    @property
    def identity(self) -> tuple[Any, ...]:
        """What fingerprints of prompts are made of: fields at the end that are empty do not count."""
        fields = list(self)
        while len(fields) > 2 and not fields[-1]:
            fields.pop()
        return tuple(fields)

    def for_template(self) -> dict[str, Any]:
        """Return the dict that chat templates read. Pictures are `{"type": "image"}`, in their places."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if not isinstance(self.content, str):
            message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.content
            ]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        return message


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    """Templates print arguments as JSON; text that is no JSON object stays text."""
    parsed = call.parsed
    function = {"name": call.name, "arguments": call.arguments if parsed is None else parsed}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}
