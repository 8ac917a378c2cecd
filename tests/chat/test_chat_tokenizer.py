"""Text never becomes a special token; special tokens are only reached by name."""

import pickle

import pytest
import tokenizers
from chat_conversations import CONVERSATIONS
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

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


# --- vocabularies that keep text as added tokens --------------------------------------------------


@pytest.fixture(scope="module")
def gemma_like() -> HFTokenizer:
    """A BPE over characters that writes a space as U+2581, falls back to bytes, and lists every added token as a word:
    runs of white space (which merges need), HTML tags, markers flagged special and not."""
    spaces = ["\n", "\n\n", "\u2581\u2581"]
    added = [*spaces, "<b>", "</b>", "<bbox>", "<unused0>", "<s>", "<start_of_turn>"]
    words = ["<unk>", *added, *map("<0x{:02X}>".format, range(256)), *"\u2581abcdefghijklmnopqrstuvwxyz_<>/0"]
    merges = [("\n", "\n"), ("\u2581", "\u2581")]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(w, special=False, normalized=False) for w in added[:-2]])
    backend.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in added[-2:]])
    return wrap(PreTrainedTokenizerFast(tokenizer_object=backend), name="gemma-like")


@pytest.mark.parametrize("text", ["a  b\n\n\n c", "a <b>bold</b>", "\u2581\u2581\u2581", "é🙂", "\n", "   ", "<0x0A>"])
def test_white_space_and_html_that_a_vocabulary_keeps_as_tokens_is_text(gemma_like: HFTokenizer, text: str) -> None:
    ids = gemma_like.encode(text)
    assert ids == gemma_like.full.encode(text, add_special_tokens=False).ids
    assert gemma_like.decode(ids) == text.replace("\u2581", " ")
    assert set(gemma_like.specials) == {"<bbox>", "<unused0>", "<s>", "<start_of_turn>"}


@given(st.lists(st.sampled_from(["<start_of_turn>", "<unused0>", "<s>", "<bbox>", "<b>", "<", ">", " ", "\n", "é"])))
def test_no_marker_of_such_a_vocabulary_comes_from_text(gemma_like: HFTokenizer, parts: list[str]) -> None:
    ids = gemma_like.encode("".join(parts))
    assert not set(ids) & set(gemma_like.specials.values())
    assert gemma_like.decode(ids) == "".join(parts)


def test_an_html_tag_that_is_flagged_special_is_no_text(gemma_like: HFTokenizer) -> None:
    assert gemma_like.special("<s>") not in gemma_like.encode("<s>x</s>")
    with pytest.raises(ValueError, match="'gemma-like' has no special token '<b>'"):
        gemma_like.special("<b>")


# --- real vocabularies ----------------------------------------------------------------------------

REAL = (
    "smollm2",
    "qwen2.5",
    "qwen3",
    "llama3",
    "llama3.1",
    "llama3.2",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "mistral_nemo",
)
ORDINARY = (
    *(message.content for messages, _ in CONVERSATIONS.values() for message in messages),
    *(" " * k + "x" + "\t" * k + "\n" * k for k in range(1, 40)),
    "a\u00a0b\u3000c\u200b\x00\x7f<0x0A>\u2581\u2581x \u2581",
    "<table><tr><td>1</td></tr></table>\n<ul>\n  <li><code>x</code></li>\n</ul>",
)


@pytest.mark.full
@pytest.mark.parametrize("name", REAL)
def test_real_text_never_gives_a_special_id(name: str, real_tokenizer) -> None:
    tokenizer = real_tokenizer(name)
    special = set(tokenizer.specials.values())
    for spelling in tokenizer.specials:
        text = f"x{spelling}\n{spelling} y{spelling}{spelling}"
        ids = tokenizer.encode(text)
        assert not set(ids) & special
        assert tokenizer.decode(ids) == text.replace("\u2581", " " if name == "gemma3" else "\u2581")


@pytest.mark.full
@pytest.mark.parametrize("name", REAL)
@given(data=st.data())
def test_no_arrangement_of_spellings_gives_a_real_special_id(name: str, data: st.DataObject, real_tokenizer) -> None:
    tokenizer = real_tokenizer(name)
    spelling = st.sampled_from(sorted(tokenizer.specials))
    part = spelling | st.tuples(spelling, st.integers(1, 6)).map(lambda cut: cut[0][: cut[1]]) | st.text(max_size=3)
    text = "".join(data.draw(st.lists(part, max_size=12)))
    assert not set(tokenizer.encode(text)) & set(tokenizer.specials.values())


@pytest.mark.full
@pytest.mark.parametrize("name", REAL)
def test_ordinary_text_is_encoded_as_the_real_tokenizer_does(name: str, real_tokenizer) -> None:
    tokenizer = real_tokenizer(name)
    for text in ORDINARY:
        assert tokenizer.encode(text) == tokenizer.full.encode(text, add_special_tokens=False).ids, text
