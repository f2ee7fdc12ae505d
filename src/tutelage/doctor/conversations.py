"""Conversations on which chat templates are compared: with and without a system prompt, of one and several turns, in
several scripts, and with characters that templates and tokenizers treat specially."""

from __future__ import annotations

from tutelage.data.messages import Message

Conversation = tuple[Message, ...]


def _turns(*contents: str, system: str | None = None) -> Conversation:
    """The user speaks first, then both in turn."""
    spoken = [Message(("user", "assistant")[n % 2], content) for n, content in enumerate(contents)]
    return (*([Message("system", system)] if system is not None else []), *spoken)


CONVERSATIONS: tuple[Conversation, ...] = (
    _turns("Hello!"),
    _turns("Why is the sky blue?"),
    _turns("Hello!", system="You are a helpful assistant."),
    _turns("What is 17 × 23?", system="Answer with a number only."),
    _turns("Hi.", "Hello, how can I help?", "Name three rivers."),
    _turns("Hi.", "Hello, how can I help?", "Name three rivers.", system="You are terse."),
    _turns("One.", "Two.", "Three.", "Four.", "Five."),
    _turns("One.", "Two.", "Three.", "Four.", "Five.", system="Count."),
    _turns("Name a colour.", "Blue."),
    _turns("Name a colour.", "Blue.", system="Use one word."),
    _turns("Name a colour.", "Blue.", "Another one.", "Green."),
    _turns("¿Dónde está la biblioteca? Über Straßen läuft's."),
    _turns("天空为什么是蓝色的?", system="请用中文回答。"),
    _turns("لماذا السماء زرقاء؟", "بسبب تشتت الضوء.", "שלום"),
    _turns("Smile 🙂, family 👨‍👩‍👧, flag 🇫🇷.", "🙂"),
    _turns("  two spaces before and after  "),
    _turns("line one\nline two\n\n\tindented\r\nlast"),
    _turns("def f(x):\n    return {'a': [x, 1.5e-3]}  # {{ braces }} {% percent %}"),
    _turns("<b>tags</b> & \"quotes\" 'single' \\ backslash </s> <|end|>", system="<system>"),
    _turns("e\u0301 (combining) ﬁ (ligature) \u00a0 (no-break space) 𝒳", "①②③", "and then?"),
)


def outline(conversation: Conversation) -> str:
    """The roles of a conversation, to name it."""
    return ", ".join(message.role for message in conversation)
