"""Text never becomes a special token; special tokens are only reached by name."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.chat.tokenizer import (
    BYTE_SPECIALS,
    BYTE_VOCAB_SIZE,
    HFTokenizer,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    wrap,
)

BYTES = byte_tokenizer()
SPELLED = st.lists(st.sampled_from([*BYTE_SPECIALS, "hello", " ", "\n", "\n\n", "é", "🙂", "<", "|>"])).map("".join)


def test_byte_vocabulary() -> None:
    assert isinstance(BYTES, Tokenizer)
    assert BYTES.vocab_size == BYTE_VOCAB_SIZE == 320
    assert [BYTES.special(s) for s in BYTE_SPECIALS] == list(range(256, 265))
    assert BYTES.decode([104, 105, 257, 300]) == "hi<|im_start|><|unused_300|>"


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.lists(st.integers(0, 319)))
def test_bytes_decode_anything_in_the_vocabulary(ids: list[int]) -> None:
    assert isinstance(BYTES.decode(ids), str)


@given(SPELLED | st.text())
def test_bytes_text_never_gives_a_special_id(text: str) -> None:
    assert all(i < 256 for i in BYTES.encode(text))


def test_bytes_lone_surrogate_becomes_a_question_mark() -> None:
    assert BYTES.decode(BYTES.encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize("i", [-1, 320])
def test_bytes_id_outside_the_vocabulary_is_named(i: int) -> None:
    with pytest.raises(ValueError, match=f"token id {i} is outside the byte vocabulary"):
        BYTES.decode([i])


def test_missing_special_names_token_and_tokenizer(tiny: HFTokenizer) -> None:
    with pytest.raises(ValueError, match=r"tokenizer 'bytes' has no special token '<\|eot_id\|>'"):
        BYTES.special("<|eot_id|>")
    with pytest.raises(ValueError, match="tokenizer 'tiny' has no special token 'hello'"):
        tiny.special("hello")


@pytest.mark.parametrize("spelling", BYTE_SPECIALS)
def test_hf_text_never_gives_an_added_id_whatever_its_flag(tiny: HFTokenizer, spelling: str) -> None:
    ids = tiny.encode(f"hello{spelling}hello")
    assert not set(ids) & set(tiny.specials.values())
    assert tiny.decode(ids) == f"hello{spelling}hello"
    assert tiny.decode([tiny.special(spelling)]) == spelling


def test_hf_split_special_tokens_would_not_have_been_enough(tiny: HFTokenizer) -> None:
    """Why HFTokenizer keeps a second backend: the switch that transformers offers leaves special=False tokens on."""
    full = pickle.loads(pickle.dumps(tiny.full))
    full.encode_special_tokens = True
    assert tiny.special("<|im_end|>") not in full.encode("<|im_end|>").ids
    assert tiny.special("<think>") in full.encode("<think>").ids


def test_hf_encodes_as_the_full_tokenizer_where_nothing_is_spelled(tiny: HFTokenizer) -> None:
    text = "hello hehe\n\n\nünï 🙂 < think >"
    assert tiny.encode(text) == tiny.full.encode(text, add_special_tokens=False).ids
    assert tiny.encode("a\ud800b") == tiny.encode("a?b")
    assert tiny.encode("") == []


def test_hf_is_picklable(tiny: HFTokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tiny))
    assert copy.encode("hello<think>") == tiny.encode("hello<think>")
    assert copy.special("<think>") == tiny.special("<think>")


def test_load_reads_a_directory_and_does_not_truncate(tiny: HFTokenizer, tmp_path) -> None:
    from transformers import PreTrainedTokenizerFast

    full = pickle.loads(pickle.dumps(tiny.full))
    full.enable_truncation(4)
    PreTrainedTokenizerFast(tokenizer_object=full, chat_template="x").save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("hello " * 50) == tiny.encode("hello " * 50)
    assert loaded.chat_template == "x"
    assert loaded.vocab_size == tiny.vocab_size


def test_load_says_what_it_wanted(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"(?s)no tokenizer could be loaded from .*Expected a directory"):
        load_tokenizer(str(tmp_path))


def test_wrap_refuses_a_tokenizer_without_backend() -> None:
    class Slow:
        name_or_path = "old"

    with pytest.raises(ValueError, match="tokenizer 'old' is a Slow without a fast backend"):
        wrap(Slow())


@pytest.mark.full
@pytest.mark.parametrize("real", ["smollm2", "qwen3"])
def test_real_text_never_gives_an_added_id(real: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(real)
    added = set(tokenizer.specials.values())
    for spelling in tokenizer.specials:
        ids = tokenizer.encode(f"x{spelling}\n{spelling} y")
        assert not set(ids) & added
        assert tokenizer.decode(ids) == f"x{spelling}\n{spelling} y"
