"""The text of an answer, token by token, against what vLLM 0.30's detokenizer does."""

from __future__ import annotations

import pytest

from rtk.serve.answer_text import AnswerText, TextOptions
from rtk.serve.engine import Token


def pieces(tokenizer, ids, *, prompt=(1,), finish="length", **options):
    text = AnswerText(tokenizer, list(prompt), TextOptions(**options))
    shown = []
    for position, token in enumerate(ids):
        last = position == len(ids) - 1
        shown.append(text.add(Token(token, -1.0, 1, [], finish if last else None, None)))
        if shown[-1].finish_reason is not None:
            break
    return shown


def texts(shown):
    return [piece.text for piece in shown]


def test_a_character_comes_once_it_is_whole(engine):
    ids = engine.tokenizer.encode("aé€b")
    assert texts(pieces(engine.tokenizer, ids)) == ["a", "", "é", "", "", "€", "b"]


def test_bytes_that_are_no_character_do_not_hold_the_rest_back(engine):
    lone = engine.tokenizer.encode("é")[0]
    ids = [lone, *engine.tokenizer.encode("ab")]
    assert texts(pieces(engine.tokenizer, ids)) == ["", "\ufffda", "b"]


def test_a_word_keeps_its_space_where_the_tokenizer_drops_a_leading_one():
    transformers = pytest.importorskip("transformers", reason="needs moe-rtk[embedded]")
    from tokenizers import Tokenizer, decoders, models

    words = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1}, unk_token="▁Hello"))
    words.decoder = decoders.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "world"  # or there were nothing to keep
    assert texts(pieces(tokenizer, [1, 1], prompt=[0])) == [" world", " world"]


def test_nothing_of_a_stop_text_is_shown(engine):
    shown = pieces(engine.tokenizer, engine.tokenizer.encode("one END two"), stop=["END"])
    assert "".join(texts(shown)) == "one "
    assert (shown[-1].finish_reason, shown[-1].stop_reason) == ("stop", "END")
    assert len(shown) == len("one END")


def test_what_only_looked_like_a_stop_text_is_shown_in_the_end(engine):
    shown = pieces(engine.tokenizer, engine.tokenizer.encode("xEN"), stop=["END"])
    assert texts(shown) == ["", "", "xEN"]
    assert (shown[-1].finish_reason, shown[-1].stop_reason) == ("length", None)


def test_the_stop_text_that_is_complete_first_counts(engine):
    shown = pieces(engine.tokenizer, engine.tokenizer.encode("abcd"), stop=["bcd", "c"])
    assert ("".join(texts(shown)), shown[-1].stop_reason) == ("ab", "c")


def test_a_stop_text_can_be_kept(engine):
    shown = pieces(engine.tokenizer, engine.tokenizer.encode("one END"), stop=["END"], keep_stop=True)
    assert "".join(texts(shown)) == "one END"


def test_a_stop_text_within_the_first_tokens_does_not_count(engine):
    shown = pieces(engine.tokenizer, engine.tokenizer.encode(",,,,,"), stop=[","], min_tokens=3)
    # As vLLM answers: four tokens, three commas.
    assert ("".join(texts(shown)), len(shown)) == (",,,", 4)


@pytest.mark.parametrize(("keep", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_has_text_only_when_kept(engine, keep, text):
    shown = pieces(engine.tokenizer, engine.tokenizer.encode("ab"), finish="stop", keep_stop=keep)
    assert "".join(texts(shown)) == text


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "a<|end|>")])
def test_special_tokens_have_text_when_wanted(engine, skip, text):
    ids = [*engine.tokenizer.encode("a"), 256]
    assert "".join(texts(pieces(engine.tokenizer, ids, skip_special_tokens=skip))) == text
