"""Which renderer a name recommends, and what happens when name and template disagree."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.chat.families import RENDERERS, renderer_for
from jaxrl.chat.model_info import known_renderer, recommended_names, recommended_renderer
from jaxrl.chat.tokenizer import byte_tokenizer

BYTES = byte_tokenizer()
NAMES = """
qwen2.5: Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-Coder-7B-Instruct Qwen/Qwen2.5-14B-Instruct-1M
qwen3: Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B Qwen/Qwen3-8B-FP8 unsloth/Qwen3-0.6B-GGUF
qwen3_instruct: Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-235B-A22B-Instruct-2507-FP8 Qwen/Qwen3-Next-80B-A3B-Instruct
qwen3_thinking: Qwen/Qwen3-4B-Thinking-2507 Qwen/Qwen3-235B-A22B-Thinking-2507
qwen3_coder: Qwen/Qwen3-Coder-30B-A3B-Instruct
qwen3.5: Qwen/Qwen3.5-4B Qwen/Qwen3.5-35B-A3B Qwen/Qwen3.6-27B
qwq: Qwen/QwQ-32B
llama3: meta-llama/Meta-Llama-3-8B-Instruct meta-llama/Meta-Llama-3-70B-Instruct
llama3.1: meta-llama/Llama-3.1-8B-Instruct meta-llama/Meta-Llama-3.1-405B-Instruct meta-llama/Llama-3.3-70B-Instruct
llama3.2: meta-llama/Llama-3.2-1B-Instruct unsloth/Llama-3.2-3B-Instruct-bnb-4bit
gemma3: google/gemma-3-4b-it google/gemma-3-270m-it
gpt_oss: openai/gpt-oss-20b openai/gpt-oss-120b
deepseek_v3: deepseek-ai/DeepSeek-V3 deepseek-ai/DeepSeek-V3-0324
deepseek_r1: deepseek-ai/DeepSeek-R1 deepseek-ai/DeepSeek-R1-0528 deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
deepseek_r1: deepseek-ai/DeepSeek-R1-Distill-Llama-8B deepseek-ai/DeepSeek-R1-0528-Qwen3-8B
deepseek_v3.1: deepseek-ai/DeepSeek-V3.1 deepseek-ai/DeepSeek-V3.1-Terminus
kimi_k2: moonshotai/Kimi-K2-Instruct moonshotai/Kimi-K2-Instruct-0905
kimi_k2_thinking: moonshotai/Kimi-K2-Thinking
glm4.5: zai-org/GLM-4.5 zai-org/GLM-4.5-Air zai-org/GLM-4.6
glm4.7: zai-org/GLM-4.7 zai-org/GLM-4.7-Flash
mistral_v3: mistralai/Mistral-Nemo-Instruct-2407
mistral_v11: mistralai/Mistral-Small-3.2-24B-Instruct-2506
devstral: mistralai/Devstral-Small-2507
ministral3_reasoning: mistralai/Ministral-3-14B-Reasoning-2512
smollm2: HuggingFaceTB/SmolLM2-135M-Instruct models/SmolLM2-135M-Instruct.Q4_1.gguf
role_colon: Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-Coder-7B Qwen/Qwen3-8B-Base Qwen/Qwen3.5-4B-Base meta-llama/Llama-3.1-8B
role_colon: meta-llama/Llama-3.2-1B meta-llama/Meta-Llama-3-8B google/gemma-3-4b-pt google/gemma-3-270m
role_colon: deepseek-ai/DeepSeek-V3-Base deepseek-ai/DeepSeek-V3.1-Base moonshotai/Kimi-K2-Base zai-org/GLM-4.5-Air-Base
role_colon: mistralai/Mistral-Nemo-Base-2407 HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-1.7B
"""
KNOWN = [
    (name, renderer)
    for line in NAMES.strip().splitlines()
    for renderer, names in [line.split(": ")]
    for name in names.split()
]
UNKNOWN = [
    "bytes",
    "tiny",
    "microsoft/Phi-4-mini-instruct",
    "google/gemma-2-2b-it",
    "google/gemma-3n-E2B-it",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-VL-8B-Thinking",
    "Qwen/Qwen3-Embedding-0.6B",
    "Qwen/QwQ-32B-Preview",
    "Qwen/Qwen2.5-Math-7B-Instruct",
    "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-R1-Zero",
    "moonshotai/Kimi-K2.5",
    "zai-org/GLM-4.5V",
    "database/llama",
    "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistralai/Ministral-3-14B-Instruct-2512",
    "mistralai/Devstral-Small-2505",
]


@pytest.mark.parametrize(("name", "renderer"), KNOWN)
def test_a_published_name_has_its_renderer(name: str, renderer: str) -> None:
    assert recommended_renderer(name) == renderer
    assert recommended_renderer(f"/data/models/{name.lower()}/") == renderer
    assert recommended_renderer("/hub/models--" + name.replace("/", "--") + "/snapshots/0e1f") == renderer or (
        renderer == "role_colon"  # a base model of which only the size tells must be named alone
    )


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"nothing is known of a model named '{name}'.*'template'.*'role_colon' for a"):
        recommended_renderer(name)


def test_every_renderer_of_the_table_is_registered_and_has_an_example() -> None:
    assert recommended_names() <= set(RENDERERS)
    assert recommended_names() == {renderer for _, renderer in KNOWN}


def test_the_last_part_of_a_path_that_says_anything_counts() -> None:
    assert recommended_renderer("/runs/qwen3/Llama-3.1-8B-Instruct") == "llama3.1"
    assert recommended_renderer("/runs/Qwen3-8B/checkpoints/7") == "qwen3"
    assert recommended_renderer(r"C:\models\QwQ-32B") == "qwq"


@given(st.text(max_size=40))
def test_any_name_is_looked_up_without_a_fault(name: str) -> None:
    assert known_renderer(name) in {None, *recommended_names()}


# --- with a tokenizer ------------------------------------------------------------------------------


def test_the_template_of_a_tokenizer_counts_and_a_name_that_agrees_is_silent() -> None:
    assert renderer_for(replace(BYTES, name="my-finetune")).name == "chatml"
    assert renderer_for(replace(BYTES, name="Qwen/Qwen2.5-0.5B")).name == "chatml", "a base model's name says nothing"


def test_a_name_against_the_template_is_an_error_that_shows_both() -> None:
    message = "'Qwen/Qwen3-8B' is named like a model of renderer 'qwen3', but has the chat template of 'chatml'"
    with pytest.raises(ValueError, match=message):
        renderer_for(replace(BYTES, name="Qwen/Qwen3-8B"))
    assert renderer_for(replace(BYTES, name="Qwen/Qwen3-8B"), "qwen3").name == "qwen3"


def test_a_template_of_its_own_is_not_overruled_by_the_name_of_what_it_was_trained_from() -> None:
    vicuna = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\\n{% endfor %}ASSISTANT:"
    tokenizer = replace(byte_tokenizer(chat_template=vicuna), name="/models/qwen3-8b-vicuna-sft")
    with pytest.raises(ValueError, match=r"matches no known family.*'template'"):
        renderer_for(tokenizer)


@pytest.mark.parametrize("template", [None])
def test_without_a_template_the_name_decides(template: str | None) -> None:
    assert renderer_for(replace(BYTES, name="Qwen/Qwen3-8B", chat_template=template)).name == "qwen3"
    assert renderer_for(replace(BYTES, name="org/Thing-Base", chat_template=template)).name == "role_colon"
    with pytest.raises(ValueError, match="Pass name= one of"):
        renderer_for(replace(BYTES, chat_template=template))


@pytest.mark.full
@pytest.mark.parametrize("real", ["qwen2.5", "qwen3", "llama3", "llama3.2", "smollm2"])
def test_real_tokenizers_have_the_template_of_their_name(real: str, real_tokenizer) -> None:
    assert renderer_for(real_tokenizer(real)).name == recommended_renderer(real) == real
