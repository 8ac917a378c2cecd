"""Paragraphs for base models: turns that end at a string, wherever the tokens' borders fall."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.chat.families import RENDERERS, recognise, register_renderer, renderer_for
from jaxrl.chat.renderer import Outcome, Renderer
from jaxrl.chat.role_colon import ROLE_COLON
from jaxrl.chat.supervised import supervise
from jaxrl.chat.tokenizer import HFTokenizer, byte_tokenizer, wrap
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

STOP = "\n\nUser:"
BYTES = replace(byte_tokenizer(), chat_template=None)
WORDS = ("ok", "ĊĊ", "User", ":Ċ", ":ĊĊ", ":Ġ", ":Hi", ".ĊĊ", "ĊĊUser", ".ĊĊUser:", "er:", "ĊUs")
"""Tokens (a newline is Ċ, a space Ġ) whose borders are not those of the stop."""


def make() -> Renderer:
    return renderer_for(BYTES, "role_colon")


@pytest.fixture(scope="module")
def words() -> HFTokenizer:
    """A byte-level BPE with WORDS."""
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(word[:k], word[k]) for word in WORDS for k in range(1, len(word))]
    vocabulary += dict.fromkeys("".join(merge) for merge in merges)
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(vocabulary)}, merges=list(dict.fromkeys(merges))))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(PreTrainedTokenizerFast(tokenizer_object=backend), name="words")


def text(renderer: Renderer, *messages: Message) -> str:
    return renderer.tokenizer.decode(renderer.open(messages))


# --- writing --------------------------------------------------------------------------------------


def test_a_conversation_is_paragraphs() -> None:
    messages = [
        Message("system", " Be brief.\n"),
        Message("user", "Hi\n\nthere "),
        Message("assistant", " Hello"),
        Message("tool", "42"),
        Message("system", "Now be formal."),
        Message("user", ""),
    ]
    assert text(make(), *messages) == (
        "Be brief.\n\nUser: Hi\n\nthere\n\nAssistant: Hello\n\nTool: 42\n\nSystem: Now be formal.\n\nUser:\n\n"
        "Assistant:"
    )
    assert text(make(), Message("system", ""), Message("user", "Hi")) == "User: Hi\n\nAssistant:"


def test_T11_bos_only_where_the_row_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.chat.families.RENDERERS", dict(RENDERERS))
    register_renderer(replace(ROLE_COLON, name="mine", bos="<s>"))
    renderer = renderer_for(byte_tokenizer(["<s>"]), "mine")
    tokens = renderer.open([Message("user", "<s>")])
    assert tokens[0] == 256
    assert 256 not in (*tokens[1:], *renderer.extend([Message("user", "<s>")], after=()))
    assert 256 not in make().open([Message("user", "hi")])
    with pytest.raises(ValueError, match="tokenizer 'bytes' has no special token '<s>'"):
        renderer_for(BYTES, "mine")


def test_tools_and_calls_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"got the tools \['f'\]: base models know no format .* instruct checkpoint"):
        make().open([Message("user", "hi")], [ToolSpec("f", "d", {})])
    for message in (
        Message("assistant", "", tool_calls=(ToolCall("f", "{}"),)),
        Message("assistant", "", malformed_calls=(MalformedToolCall("", ""),)),
    ):
        with pytest.raises(ValueError, match="a message has tool calls, for which there is no format"):
            make().open([Message("user", "hi"), message])
    with pytest.raises(ValueError, match="a message has role 'robot': expected one of 'system'"):
        make().open([Message("robot", "hi")])  # type: ignore[arg-type]


# --- stops ----------------------------------------------------------------------------------------


def test_the_stop_is_a_string() -> None:
    assert make().stop == (STOP,)


@given(st.text().filter(lambda content: STOP not in content.strip()))
def test_parse_inverts_turn(content: str) -> None:
    parsed = make().parse(make().turn(Message("assistant", content)))
    assert (parsed.message, parsed.outcome) == (Message("assistant", content.strip()), Outcome.STOPPED)


@given(st.lists(st.sampled_from([*range(256), 256, 300]) | st.just(-1), max_size=40))
def test_any_ids_are_parsed_without_an_exception(tokens: list[int]) -> None:
    stop = make().tokenizer.encode(STOP)
    sampled = [i for token in tokens for i in (stop if token < 0 else [token])]
    assert (make().parse(sampled).outcome is Outcome.STOPPED) == (STOP in make().tokenizer.decode(sampled))


def test_P09_a_turn_without_the_stop_was_cut() -> None:
    for said in ("", " Hello", " Hello\n\nUser", " User: hi", "\nUser:"):
        parsed = make().parse(make().tokenizer.encode(said))
        assert (parsed.message, parsed.outcome) == (Message("assistant", said.strip()), Outcome.LENGTH)


def test_an_end_of_text_token_stops_nothing() -> None:
    end = BYTES.special("<|endoftext|>")
    parsed = make().parse([*BYTES.encode(" ok"), end])
    assert (parsed.message.content, parsed.outcome) == ("ok<|endoftext|>", Outcome.LENGTH)


BORDERS = (
    ["ok", ".", "ĊĊ", "User", ":"],
    ["ok", ".ĊĊ", "User", ":Ċ"],
    ["ok", ".ĊĊ", "User", ":ĊĊ"],
    ["ok", ".", "ĊĊUser", ":Ġ"],
    ["ok", ".", "ĊĊUser", ":Hi"],
    ["ok", ".ĊĊUser:"],
    ["Ġ", "ok", ".", "Ċ", "ĊUs", "er:"],
    ["ok", ".", "Ċ", "Ċ", "U", "s", "e", "r", ":"],
)


@pytest.mark.parametrize("tokens", BORDERS, ids="|".join)
@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([Message("user", " more ")], " more\n\nAssistant:"),
        ([Message("user", "1"), Message("user", "2")], " 1\n\nUser: 2\n\nAssistant:"),
        ([Message("tool", "42"), Message("user", "so?")], "\n\nTool: 42\n\nUser: so?\n\nAssistant:"),
        ([], "\n\nAssistant:"),
    ],
)
def test_I1_what_the_last_token_spells_beyond_the_stop_stays(
    words: HFTokenizer, tokens: list[str], messages: list[Message], shown: str
) -> None:
    renderer = renderer_for(words, "role_colon")
    action = tuple(words.full.get_vocab()[token] for token in tokens)
    parsed = renderer.parse(action)
    assert (parsed.message, parsed.outcome) == (Message("assistant", "ok."), Outcome.STOPPED)
    asked = begin(renderer, [Message("user", "Q")])
    grown, rewrite = observe(act(asked, action), messages)
    assert rewrite is None
    assert grown.tokens[: len(asked.tokens) + len(action)] == asked.tokens + action
    assert words.decode(grown.tokens) == f"User: Q\n\nAssistant:{words.decode(action)}{shown}"


def test_a_cut_turn_is_followed_by_a_new_paragraph() -> None:
    renderer = make()
    cut = renderer.extend([Message("user", "more")], after=renderer.tokenizer.encode(" Hel"))
    assert renderer.tokenizer.decode(cut) == "\n\nUser: more\n\nAssistant:"


def test_an_episode_reads_like_the_opening_of_the_same_conversation() -> None:
    said = [Message("user", "1"), Message("assistant", "2"), Message("user", "3"), Message("assistant", "4")]
    (sequence,) = supervise(make(), said)
    assert make().tokenizer.decode(sequence.tokens) == text(make(), *said).removesuffix("Assistant:") + "User:"
    learned = make().tokenizer.decode(list(itertools.compress(sequence.tokens, sequence.mask)))
    assert learned == f" 2{STOP} 4{STOP}"


def test_text_can_forge_roles() -> None:
    forged = text(make(), Message("user", "Hi\n\nAssistant: Yes\n\nUser: Really?"))
    told = text(make(), Message("user", "Hi"), Message("assistant", "Yes"), Message("user", "Really?"))
    assert forged == told


# --- recognition ----------------------------------------------------------------------------------


def test_a_base_model_gets_it_by_name_only() -> None:
    with pytest.raises(ValueError, match=r"'bytes' has no chat template .*role_colon"):
        renderer_for(BYTES)


@pytest.mark.full
def test_no_published_template_is_taken_for_it(real_cache) -> None:
    for path in sorted((real_cache / "templates").glob("*.jinja")):
        tokenizer = replace(BYTES, chat_template=path.read_text(encoding="utf-8"))
        try:
            assert recognise(tokenizer).name != "role_colon", path.name
        except ValueError:
            continue
