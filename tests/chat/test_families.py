"""Which renderer a tokenizer gets."""

from dataclasses import replace

import pytest

from jaxrl.chat.chatml import CHATML, QWEN2_5
from jaxrl.chat.families import RENDERERS, register_renderer, renderer_for
from jaxrl.chat.tokenizer import CHATML_TEMPLATE, HFTokenizer, byte_tokenizer

BYTES = byte_tokenizer()
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SMOLLM2_LIKE = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\\n' }}{% endif %}" + PLAIN
)


def test_a_family_is_recognised_by_what_its_template_writes() -> None:
    assert renderer_for(BYTES).name == "chatml"
    assert renderer_for(replace(BYTES, chat_template="{# reformatted #}" + CHATML_TEMPLATE)).name == "chatml"
    assert renderer_for(replace(BYTES, chat_template=SMOLLM2_LIKE)).name == "smollm2"


@pytest.mark.parametrize("template", [PLAIN, "{{ broken", "{{ raise_exception('no') }}", "", "{{ messages[9].role }}"])
def test_an_unknown_template_is_refused_with_advice(template: str) -> None:
    with pytest.raises(ValueError, match=r"'bytes' matches no known family\. Pass name= one of chatml, .*qwen"):
        renderer_for(replace(BYTES, chat_template=template))


def test_no_template_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"'bytes' has no chat template .*register_renderer"):
        renderer_for(replace(BYTES, chat_template=None))
    assert renderer_for(replace(BYTES, chat_template=None), "qwen3").name == "qwen3"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown renderer 'qwen'.*chatml, .*qwen2.5, .*smollm2.*Did you mean"):
        renderer_for(BYTES, "qwen")


def test_a_vocabulary_without_the_markers_is_refused(tiny: HFTokenizer) -> None:
    few = replace(tiny, specials={k: v for k, v in tiny.specials.items() if "think" not in k})
    with pytest.raises(ValueError, match="tokenizer 'tiny' has no special token '<think>'"):
        renderer_for(few, "qwen3")
    assert renderer_for(few, "qwen2.5").name == "qwen2.5"


def test_I12_a_choice_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="thinking='strip' has no effect"):
        renderer_for(BYTES, "smollm2", thinking="strip")
    with pytest.raises(ValueError, match="enable_thinking=False has no effect"):
        renderer_for(BYTES, "chatml", enable_thinking=False)
    with pytest.raises(ValueError, match="thinking='drop' is unknown"):
        renderer_for(BYTES, "qwen3", thinking="drop")  # type: ignore[arg-type]


def test_register_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.chat.families.RENDERERS", dict(RENDERERS))
    mine = replace(QWEN2_5, name="mine", default_system="Be kind.")
    register_renderer(mine)
    assert renderer_for(BYTES, "mine").family == mine
    with pytest.raises(ValueError, match="a renderer named 'chatml' exists already"):
        register_renderer(CHATML)


@pytest.mark.full
@pytest.mark.parametrize("real", ["smollm2", "qwen3"])
def test_real_tokenizers_are_recognised(real: str, request: pytest.FixtureRequest) -> None:
    assert renderer_for(request.getfixturevalue(real)).name == real
