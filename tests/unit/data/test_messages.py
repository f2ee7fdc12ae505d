"""Chat messages: what they hold and what chat templates and fingerprints get of them."""

from __future__ import annotations

import json

import pytest

from tutelage.data.messages import Image, Message, ToolCall
from tutelage.data.prompts import PromptSet
from tutelage.data.trajectory import Prompt


def test_a_plain_message_is_role_and_content() -> None:
    message = Message("user", "Why?")
    assert (message.text, message.images) == ("Why?", ())
    assert message.for_template() == {"role": "user", "content": "Why?"}


def test_a_template_gets_calls_with_parsed_arguments() -> None:
    calls = (ToolCall("add", '{"a": 1}', "c1"), ToolCall("add", "{broken"))
    message = Message("assistant", "Let me see.", reasoning="Sums.", tool_calls=calls)
    assert message.for_template() == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Sums.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
            {"type": "function", "function": {"name": "add", "arguments": "{broken"}},
        ],
    }
    result = Message("tool", "3", tool_call_id="c1", name="add")
    assert result.for_template() == {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}


def test_pictures_keep_their_places() -> None:
    message = Message("user", ("Here: ", Image("9f2c"), " and ", Image("77aa"), "?"))
    assert message.text == "Here:  and ?"
    assert message.images == (Image("9f2c"), Image("77aa"))
    kinds = [part["type"] for part in message.for_template()["content"]]
    assert kinds == ["text", "image", "text", "image", "text"]


@pytest.mark.parametrize("text", ["[1]", "7", "{", "", '"a"', "null", "[" * 100_000])
def test_arguments_that_are_no_object_have_no_dict(text: str) -> None:
    assert ToolCall("f", text).parsed is None


def test_fingerprints_of_plain_messages_are_those_of_pairs() -> None:
    """Checkpoints that were written before messages had further fields are still accepted."""
    assert Message("user", "hi").identity == ("user", "hi")
    assert json.dumps(Message("user", "hi").identity) == '["user", "hi"]'
    called = Message("assistant", "", tool_calls=(ToolCall("f"),))
    assert called.identity == ("assistant", "", "", (ToolCall("f"),))

    def digest(*messages: Message) -> str:
        return PromptSet([Prompt(0, 1, "a.jsonl", messages)], "a.jsonl").digest

    assert digest(called) != digest(called._replace(tool_calls=()))
    assert digest(Message("user", "hi")) == "5d6abd47b4b451238e485e35610a4a58c52f4a01b99b575aaad780877cb835db"
