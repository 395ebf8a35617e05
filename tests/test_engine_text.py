"""Text comes out of tokens in pieces that make the whole, and no piece holds half a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_fallback_tokenizer, byte_tokenizer

from paged_kv.engine.detokenizer import Detokenizer

TOKENIZER = byte_tokenizer()


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)))
def test_pieces_make_the_whole(data):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in data]
    assert "".join(pieces) + detokenizer.flush() == data.decode(errors="replace")


@pytest.mark.parametrize("tokenizer", [TOKENIZER, byte_fallback_tokenizer()], ids=["bytes", "byte-fallback"])
@pytest.mark.parametrize("text", ["a", "é", "漢", "🙂"])
def test_a_character_comes_with_its_last_byte(text, tokenizer):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in (text + text).encode()]
    nothing = [""] * (len(text.encode()) - 1)
    assert pieces == [*nothing, text, *nothing, text]


def test_bytes_that_are_no_text_do_not_hold_back_what_follows():
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in b"\xff\xff\xffab"]
    assert "".join(pieces[:-1]) == "\ufffd\ufffd\ufffda"
    assert pieces[-1] == "b"
