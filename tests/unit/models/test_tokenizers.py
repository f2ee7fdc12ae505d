"""Test tokenizers: rendering, the text of each token, and the comparison of vocabularies."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import (
    PreTrainedTokenizerFast,
)

import tiny
from tutelage.data.messages import Message
from tutelage.models.sources import ModelError
from tutelage.models.tokenizers import SafeTokenizer, compare, load_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete model directory."""
    return tiny.save(tmp_path / "model", kind="llama")


BYTES = SafeTokenizer(tiny.tokenizer())


def byte_fallback() -> SafeTokenizer:
    """The sentencepiece kind: unknown characters as byte tokens, whose whole run is rewritten if it is not UTF-8."""
    tokens = ["<unk>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({t: i for i, t in enumerate(tokens)}, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return SafeTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


FALLBACK = byte_fallback()


class TestTokenizer:
    def test_render(self) -> None:
        messages = [Message("system", "s"), Message("user", "the")]
        assert BYTES.decode(BYTES.render(messages)) == "<system>s<end><user>the<end><assistant>"
        assert BYTES.decode(BYTES.render(messages, add_generation_prompt=False)) == "<system>s<end><user>the<end>"
        assert BYTES.decode(BYTES.render(messages), skip_special=True) == "sthe"

    def test_lengths_are_those_of_encode_and_render(self) -> None:
        with_start = tiny.tokenizer(extra=("<start>",))
        start = [("<start>", with_start.convert_tokens_to_ids("<start>"))]
        with_start.backend_tokenizer.post_processor = TemplateProcessing(single="<start> $A", special_tokens=start)
        tokenizer = SafeTokenizer(with_start)
        chats = [[Message("user", text)] for text in ("the sky", "é" * 40, "x")]
        mixed: list[Any] = ["the", chats[0], "", chats[1], "the other", [Message("system", "s"), *chats[2]]]
        expected = [len(tokenizer.encode(p) if isinstance(p, str) else tokenizer.render(p)) for p in mixed]
        assert tokenizer.lengths(mixed) == expected
        assert expected[2] == 1, "the token that starts a text"
        assert tokenizer.lengths([]) == []

    def test_a_refused_conversation(self) -> None:
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
        with pytest.raises(ModelError, match=r"roles \[user, tool\]: no tools here"):
            SafeTokenizer(tokenizer).render([Message("user", "x"), Message("tool", "y")])

    def test_no_chat_template(self) -> None:
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = None
        with pytest.raises(ModelError, match=r"data\.template: none"):
            SafeTokenizer(tokenizer).render([Message("user", "x")])

    def test_several_chat_templates_mean_the_default_one(self) -> None:
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = {"default": tiny.TEMPLATE, "tool_use": "x"}
        messages = [Message("user", "hi")]
        assert SafeTokenizer(tokenizer).render(messages) == BYTES.render(messages)

    def test_pieces_of_characters_in_several_tokens(self) -> None:
        ids = BYTES.encode("the é🙂.")
        assert BYTES.pieces(ids) == ["the", " ", "", "é", "", "", "", "🙂", "."]
        assert BYTES.pieces(ids[:6]) == ["the", " ", "", "é", "", "\ufffd"]
        assert BYTES.pieces([]) == []

    @given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=24))
    @settings(max_examples=150, deadline=None)
    def test_pieces_join_to_the_text(self, ids: list[int]) -> None:
        pieces = BYTES.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == BYTES.decode(ids)

    @given(st.lists(st.sampled_from([1, 2, 3, 4 + 0xE4, 4 + 0xB8, 4 + 0xAD, 4 + 0xFF]), max_size=24))
    @settings(max_examples=150, deadline=None)
    def test_pieces_join_to_the_text_with_byte_fallback(self, ids: list[int]) -> None:
        pieces = FALLBACK.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == FALLBACK.decode(ids)

    def test_end_ids_come_from_both_files(self, saved: Path) -> None:
        own = tiny.tokenizer().eos_token_id
        (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, own]}))
        assert SafeTokenizer.load(saved).eos_ids == (own, 7)
        (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
        assert SafeTokenizer.load(str(saved)).eos_ids == (own, 9)
        (saved / "generation_config.json").unlink()
        assert SafeTokenizer.load(saved).eos_ids == (own,)

    def test_a_directory_without_tokenizer(self, tmp_path: Path) -> None:
        tiny.of_kind("llama").save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="tokenizer"):
            load_tokenizer(tmp_path)

    def test_one_thread_at_a_time(self) -> None:
        inside, most = 0, 0
        guard = threading.Lock()

        class Watched:
            eos_token_id = None
            chat_template = "x"

            def get_vocab(self) -> dict[str, int]:
                return {"a": 0}

            def work(self, *_: Any, **__: Any) -> Any:
                nonlocal inside, most
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.001)
                with guard:
                    inside -= 1
                return ""

            encode = decode = apply_chat_template = work

        tokenizer: Any = SafeTokenizer(Watched())  # type: ignore[arg-type]
        calls = [lambda: tokenizer.encode("a"), lambda: tokenizer.decode([0]), lambda: tokenizer.pieces([0, 0])]
        calls.append(lambda: tokenizer.render([Message("user", "a")]))
        with ThreadPoolExecutor(8) as pool:
            for job in [pool.submit(call) for call in calls * 5]:
                job.result()
        assert most == 1


class TestCompare:
    def test_the_same(self) -> None:
        shared = compare(BYTES, SafeTokenizer(tiny.tokenizer()), student_head=262, teacher_head=262)
        assert shared.size == 262
        assert shared.warnings == ()

    def test_padded_heads(self) -> None:
        shared = compare(BYTES, BYTES, student_head=320, teacher_head=384)
        assert shared.size == 320
        assert "320 and 384 rows: the last 64" in shared.warnings[0]

    def test_a_head_without_room_for_a_token(self) -> None:
        with pytest.raises(ModelError, match=r"output head of teacher has 261 rows, but .* up to 261"):
            compare(BYTES, BYTES, student_head=320, teacher_head=261)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (
                tiny.tokenizer(("t h", "h e")),
                r"262 and 262 tokens, 261 the same\): token 'he' is unknown to small and has id 257 in big",
            ),
            (
                tiny.tokenizer(extra=("<new>",)),
                r"262 and 263 tokens, 262 the same\): token '<new>' is unknown to small and has id 262",
            ),
            (tiny.tokenizer(("h e", "t h")), r"token '(th|the|he)' "),
        ],
    )
    def test_different_vocabularies(self, other: PreTrainedTokenizerFast, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            compare(
                BYTES,
                SafeTokenizer(other),
                student_head=320,
                teacher_head=320,
                student_name="small",
                teacher_name="big",
            )

    def test_other_ends_and_templates_are_warned_about(self) -> None:
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = "{{ messages }}"
        warnings = compare(BYTES, SafeTokenizer(tokenizer, [7]), student_head=320, teacher_head=320).warnings
        assert len(warnings) == 2
        assert "[258]" in warnings[0]
        assert "[258, 7]" in warnings[0]
        assert "chat templates" in warnings[1]
