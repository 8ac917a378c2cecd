"""Published chat templates, where each comes from, and which renderer must write what it writes.

A row is compared three ways: its committed texts with a byte tokenizer (hermetic), a live rendering of the template
with the committed texts, and the ids of the real tokenizer where one can be had. `differs` lists conversations on which
renderer and template part on purpose, each with its reason; a test holds that they do part.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chat_conversations import CONVERSATIONS, uses_tools

from jaxrl.chat.families import find_family, template_message
from jaxrl.chat.kimi import call_id as kimi_call_id
from jaxrl.chat.renderer import Renderer, build
from jaxrl.chat.tokenizer import Tokenizer, render_template
from jaxrl.chat.tool_calls import tool_schema
from jaxrl.types import Message, ToolSpec

FIXTURES = Path(__file__).resolve().parent / "fixtures"
Case = tuple[Sequence[Message], Sequence[ToolSpec]]


def as_they_are(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages."""
    return messages


def with_call_ids(make_id: Callable[[str, int], str]) -> Callable[[Sequence[Message]], Sequence[Message]]:
    """Fills in ids: make_id(tool's name, index of the call in the conversation). Results answer calls in order, and
    one too many the last call again."""

    def filled(messages: Sequence[Message]) -> Sequence[Message]:
        done: list[Message] = []
        ids: list[str] = []
        unanswered: deque[str] = deque()
        for message in messages:
            new = [make_id(call.name, len(ids) + k) for k, call in enumerate(message.tool_calls)]
            ids += new
            unanswered.extend(new)
            calls = tuple(replace(call, id=i) for call, i in zip(message.tool_calls, new, strict=True))
            answered = None
            if message.role == "tool":
                answered = unanswered.popleft() if unanswered else ids[-1]
            done.append(replace(message, tool_calls=calls, call_id=answered))
        return tuple(done)

    return filled


def shown_to_deepseek_v3(message: Message) -> dict[str, Any]:
    """A message as DeepSeek V3's template reads it: arguments are text, and calls without text have content None."""
    shown = template_message(message)
    for call, made in zip(message.tool_calls, shown.get("tool_calls", ()), strict=True):
        made["function"]["arguments"] = call.arguments
    return shown | {"content": None} if message.tool_calls and not message.content else shown


def with_thought_as_a_chunk(message: Message) -> dict[str, Any]:
    """The message for a template whose contents are lists of chunks."""
    shown = template_message(message)
    if (thought := shown.pop("reasoning_content", None)) is not None:
        text = [{"type": "text", "text": message.content}] if message.content else []
        shown["content"] = [{"type": "thinking", "thinking": thought}, *text]
    return shown


def mistral_call_id(name: str, k: int) -> str:
    """Nine letters and digits, as the templates demand."""
    return f"{name[:4]}{k:0{9 - len(name[:4])}d}"


def with_thought_in_content(message: Message) -> dict[str, Any]:
    """The message for a template that looks for thoughts in the content."""
    shown = template_message(message)
    if (thought := shown.pop("reasoning_content", None)) is not None:
        shown["content"] = f"<think>\n{thought}\n</think>\n\n{message.content}"
    return shown


def with_tool_names(messages: Sequence[Message]) -> Sequence[Message]:
    """Fills in which tool gave a result. Results answer calls in order, and one too many the last call again."""
    done: list[Message] = []
    names: list[str] = []
    for message in messages:
        names = [call.name for call in message.tool_calls] or names
        named = message.role == "tool"
        done.append(replace(message, name=names[0]) if named else message)
        names = names[named:] or names
    return tuple(done)


def shown_to_gpt_oss(message: Message) -> dict[str, Any]:
    """A message as the gpt-oss template reads it: thoughts have a name of their own."""
    shown = template_message(message)
    return shown if message.thinking is None else {**shown, "thinking": message.thinking}


@dataclass(frozen=True)
class Official:
    """One published template.

    name: of its fixture. renderer, options: what writes the same. tokenizer: the folder of the real one, in the test
    cache (None: none can be had, so only texts are compared). template: a file of the cache's templates/ (None: the
    tokenizer's own). variables: what it is rendered with. prepare: fills in what the family needs in a conversation,
    such as ids of calls. shown: a message as this template reads it. tools: whether it writes tools.
    describes_tools: False for a template that writes calls and results only: no tools are given.
    mended: what the template says, and what the makers' own does: where the collected copy was edited for engines that
    lack some of Jinja, or where they mended it later.
    differs: conversation -> why the renderer writes something else. grown_differs: why an episode grown turn by turn
    does. keep_differs: why it does where thoughts are kept, though none are there. merged: why the ids of a grown
    episode differ, though its text is the same.
    """

    name: str
    renderer: str
    tokenizer: str | None
    template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Sequence[Message]], Sequence[Message]] = as_they_are
    shown: Callable[[Message], dict[str, Any]] = template_message
    tools: bool = True
    describes_tools: bool = True
    mended: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    grown_differs: Mapping[str, str] = field(default_factory=dict)
    keep_differs: Mapping[str, str] = field(default_factory=dict)
    merged: Mapping[str, str] = field(default_factory=dict)

    def case(self, conversation: str) -> Case:
        """Messages and tools."""
        messages, tools = CONVERSATIONS[conversation]
        return self.prepare(messages), tools if self.describes_tools else ()

    def build(self, tokenizer: Tokenizer) -> Renderer:
        """The renderer that is compared."""
        return build(find_family(self.renderer), tokenizer, **self.options)

    def source(self, cache: Path) -> str:
        """The template's Jinja source."""
        source = self._collected(cache)
        for wrong, right in self.mended.items():
            assert wrong in source, f"the template of {self.name} does not say {wrong!r} any more"
            source = source.replace(wrong, right)
        return source

    def _collected(self, cache: Path) -> str:
        if self.template is not None:
            return (cache / "templates" / self.template).read_text(encoding="utf-8")
        assert self.tokenizer is not None, f"{self.name} names neither a template nor a tokenizer"
        return json.loads((cache / self.tokenizer / "tokenizer_config.json").read_text())["chat_template"]

    def render(self, source: str, conversation: str, special_tokens: Mapping[str, str]) -> str:
        """What the template writes. Raises what the template raises where it refuses the conversation."""
        return self.render_case(source, self.case(conversation), special_tokens)

    def render_case(self, source: str, case: Case, special_tokens: Mapping[str, str]) -> str:
        """What the template writes for any messages and tools."""
        messages, tools = case
        shown = [self.shown(m) for m in messages]
        variables = {**special_tokens, **find_family(self.renderer).template_variables, **self.variables}
        return render_template(source, shown, [tool_schema(t) for t in tools], **variables)

    def conversations(self) -> list[str]:
        """Those whose text is committed: all that the template writes without refusing."""
        return list(self.texts())

    def texts(self) -> dict[str, str]:
        """The committed texts."""
        return json.loads((FIXTURES / f"{self.name}.json").read_text(encoding="utf-8"))

    def wanted(self) -> list[str]:
        """Conversations to render: those with tools only where the template knows tools."""
        return [name for name in CONVERSATIONS if self.tools or not uses_tools(name)]


LLAMA_TEXT_AND_CALL = ("text_and_call", "thought_loop_text", "thought_newlines", "thought_empty")
DEEPSEEK_LATE = {"late_system": "the template moves a system message to the front, which an episode has passed"}
DEEPSEEK_BUGS = (
    *("one_call", "text_and_call", "text_two_calls", "tool_loop", "tool_loop_done", "tool_whitespace", "three_results"),
    *("tool_empty_result", "call_unicode", "call_nested", "thought_loop", "thought_loop_text", "thoughts_mixed"),
    *("thought_newlines", "thought_empty"),
)
DEEPSEEK_MENDED = {  # as V3-0324's template does
    "{%- if message['role'] == 'assistant' and message['content'] is none %}{%- set ns.is_tool = false -%}": (
        "{%- if message['role'] == 'assistant' and message['tool_calls'] %}"
        "{{ '<｜tool▁outputs▁end｜>' if ns.is_tool else '<｜Assistant｜>' }}{{ message['content'] or '' }}"
        "{%- set ns.is_tool = false -%}{%- set ns.is_first = false -%}{%- set ns.is_output_first = true -%}"
    ),
    "<｜Assistant｜><｜tool▁calls▁begin｜>": "<｜tool▁calls▁begin｜>",
    "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}": (
        "{%- endif %}{%- endfor %}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}"
    ),
    "message['role'] == 'assistant' and message['content'] is not none": (
        "message['role'] == 'assistant' and not message['tool_calls']"
    ),
}
DEEPSEEK_BOS = {"bos_token": "<｜begin▁of▁sentence｜>"}
KIMI_MENDED = {
    "'functions.' + tool_call['function']['name'] + ':' + (tool_call_counter.value | string)": "tool_call['id']",
    "{%- set _ = tool_response_queue.ids.append(formatted_id) -%}": "",
    "if tool_response_queue.ids": "if message.tool_call_id",
    "tool_response_queue.ids.pop(0)": "message.tool_call_id",
    "tools | tojson": "tools | tojson(separators=(',', ':'))",
}

GLM_STRAY = "a turn that announced a user keeps that marker when a system message comes"
GLM_NO_THOUGHT = tuple(
    name
    for name, (messages, _) in CONVERSATIONS.items()
    if any(m.role == "assistant" and m.thinking is None for m in messages)
)
GPT_OSS_DIFFERS = {
    "late_system": "the template drops a later system message",
    "text_and_call": "the template takes the text beside a call for a thought",
    "text_two_calls": "the template drops the text, and the second call",
    "thought_empty": "the template takes the text beside a call for a thought",
    "two_calls": "the template drops the second call",
    "three_results": "the template drops the other calls",
}
GPT_OSS_FINALS = (
    *("two_turns", "three_turns", "assistant_spaces", "assistant_empty", "assistant_unicode"),
    *("tool_loop_done", "tool_whitespace", "thought_old", "thoughts_mixed"),
)

QWEN3_THINKING_PROMPT = {  # the 2507 thinking edition: Qwen3's template with this end
    "{%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}": (
        "{%- if true %}{{- '<think>\\n' }}"
    )
}
QWEN3_5_EMPTY = dict.fromkeys(
    (
        *("one_call", "text_and_call", "two_calls", "tool_loop", "tool_empty_result", "three_results"),
        *("call_unicode", "call_nested", "thoughts_mixed", "thought_empty"),
    ),
    "the template lets the newlines in an empty thought share a token; the first is the generation prompt's",
)
MISTRAL_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NEMO_MENDED = {  # as mistral-common has it
    """{{- '"' + key + '": "' + val + '"' }}""": """{{- '"' + key + '": ' + val|tojson }}""",
    "loop.last and system_message is defined": "message == user_messages[-1] and system_message",
    '{{- "[TOOL_CALLS][" }}': '{{- message["content"] + "[TOOL_CALLS][" }}',
    "content|string": "(content|trim if content|int(-1) >= 0 else content|tojson if content else '{}')",
}
MISTRAL_LATER_USERS = dict.fromkeys(
    ("tool_loop_done", "tool_whitespace", "thoughts_mixed"),
    "the template moves the tools to the last user message; in an episode they stay where they were",
)

GPT_OSS = Official(
    "gpt_oss",
    "gpt_oss",
    "gpt_oss",
    template="openai-gpt-oss-120b.jinja",
    options={"thinking": "strip"},
    prepare=with_tool_names,
    shown=shown_to_gpt_oss,
    differs=GPT_OSS_DIFFERS,
    grown_differs=dict.fromkeys(GPT_OSS_FINALS, "a sampled <|return|> stays, the template writes <|end|>"),
)

OFFICIAL: tuple[Official, ...] = (
    Official(
        "smollm2",
        "smollm2",
        "smollm2",
        tools=False,
        merged={"assistant_spaces": "the template lets 'assistant\\n' and spaces that start a turn share a token"},
    ),
    Official(
        "qwen2.5",
        "qwen2.5",
        "qwen2.5",
        merged={"thought_newlines": "the template lets 'assistant\\n' and newlines that start a turn share a token"},
    ),
    Official("qwen3", "qwen3", "qwen3", options={"thinking": "strip"}),
    Official(
        "qwen3_nothink",
        "qwen3",
        "qwen3",
        options={"thinking": "strip", "enable_thinking": False},
        variables={"enable_thinking": False},
    ),
    Official("llama3", "llama3", "llama3", tools=False),
    Official(
        "llama3.1",
        "llama3.1",
        "llama3.1",
        template="meta-llama-Llama-3.1-8B-Instruct.jinja",
        differs=dict.fromkeys(LLAMA_TEXT_AND_CALL, "the template drops the text of a turn with a call"),
    ),
    Official(
        "llama3.2",
        "llama3.2",
        "llama3.2",
        template="meta-llama-Llama-3.2-3B-Instruct.jinja",
        variables={"date_string": "26 Jul 2024"},
        differs=dict.fromkeys(LLAMA_TEXT_AND_CALL, "the template drops the text of a turn with a call"),
    ),
    Official(
        "gemma3",
        "gemma3",
        "gemma3",
        tools=False,
        differs={"system_only": "the template drops a system prompt that stands alone"},
    ),
    Official(
        "deepseek_v3",
        "deepseek_v3",
        "deepseek_v3",
        shown=shown_to_deepseek_v3,
        describes_tools=False,
        differs=dict.fromkeys(DEEPSEEK_BUGS, "the template closes two calls, not one; it frames one turn's calls only"),
        grown_differs=DEEPSEEK_LATE,
    ),
    Official(
        "deepseek_v3_mended",
        "deepseek_v3",
        "deepseek_v3",
        shown=shown_to_deepseek_v3,
        describes_tools=False,
        mended=DEEPSEEK_MENDED,
        differs={"text_two_calls": "the template does not close results that a user's message follows"},
        grown_differs=DEEPSEEK_LATE,
    ),
    Official(
        "deepseek_r1",
        "deepseek_r1",
        None,
        template="deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
        options={"thinking": "strip"},
        variables=DEEPSEEK_BOS,
        tools=False,
        grown_differs=DEEPSEEK_LATE,
    ),
    Official(
        "deepseek_v3.1",
        "deepseek_v3.1",
        None,
        template="deepseek-ai-DeepSeek-V3.1.jinja",
        options={"thinking": "strip", "enable_thinking": False},
        variables={**DEEPSEEK_BOS, "thinking": False},
        mended={"<think></think>": "</think>"},
        describes_tools=False,
        differs={"system_only": "the template writes no prompt before a user has spoken"},
        grown_differs=DEEPSEEK_LATE,
    ),
    Official(
        "deepseek_v3.1_think",
        "deepseek_v3.1",
        None,
        template="deepseek-ai-DeepSeek-V3.1.jinja",
        options={"thinking": "strip"},
        variables={**DEEPSEEK_BOS, "thinking": True},
        mended={"<think></think>": "</think>"},
        tools=False,
        differs={"system_only": "the template writes no prompt before a user has spoken"},
        grown_differs=DEEPSEEK_LATE,
    ),
    Official(
        "kimi_k2",
        "kimi_k2",
        None,
        template="Kimi-K2-Instruct.jinja",
        prepare=with_call_ids(kimi_call_id),
        mended=KIMI_MENDED,
    ),
    Official(
        "kimi_k2_thinking",
        "kimi_k2_thinking",
        None,
        template="Kimi-K2-Thinking.jinja",
        options={"thinking": "strip"},
        prepare=with_call_ids(kimi_call_id),
        mended={
            **KIMI_MENDED,
            "{%- set ns.last_non_tool_call_assistant_msg = idx -%}": (
                "{%- set ns.last_non_tool_call_assistant_msg = idx -%}{%- break -%}"
            ),
        },
    ),
    Official(
        "qwen3_instruct",
        "qwen3_instruct",
        "qwen3",
        template="../templates_trl/qwen3_instruct_2507.jinja",
        merged={"thought_newlines": "the template lets 'assistant\\n' and newlines that start a turn share a token"},
    ),
    Official(
        "qwen3_thinking",
        "qwen3_thinking",
        "qwen3",
        mended=QWEN3_THINKING_PROMPT,
        options={"thinking": "strip"},
    ),
    Official("qwen3_coder", "qwen3_coder", "qwen3", template="Qwen3-Coder.jinja"),
    Official(
        "qwq",
        "qwq",
        "qwen3",  # the same vocabulary, markers included
        template="Qwen-QwQ-32B.jinja",
        options={"thinking": "strip"},
        mended={"{%- if not enable_thinking -%}{{- '</think>' -}}{%- endif -%}": ""},
        shown=with_thought_in_content,
        differs=dict.fromkeys(("thought_loop", "thoughts_mixed"), "the template leaves a line where a thought was"),
    ),
    Official(
        "qwen3.5",
        "qwen3.5",
        "qwen3.5",
        template="Qwen3.5-4B.jinja",
        options={"thinking": "strip"},
        merged=QWEN3_5_EMPTY,
    ),
    Official(
        "qwen3.5_nothink",
        "qwen3.5",
        "qwen3.5",
        template="Qwen3.5-4B.jinja",
        options={"thinking": "strip", "enable_thinking": False},
        variables={"enable_thinking": False},
    ),
    Official(
        "qwen3.6",
        "qwen3.5",
        "qwen3.5",
        template="../templates_trl/qwen3_6.jinja",
        options={"thinking": "strip"},
        merged=QWEN3_5_EMPTY,
    ),
    GPT_OSS,
    replace(GPT_OSS, name="gpt_oss_high", renderer="gpt_oss_high"),
    Official(
        "glm4.5",
        "glm4.5",
        None,
        template="../templates_trl/glm4moe.jinja",
        options={"thinking": "strip"},
        grown_differs={"late_system": GLM_STRAY},
    ),
    Official(
        "glm4.5_nothink",
        "glm4.5",
        None,
        template="GLM-4.6.jinja",
        options={"thinking": "strip", "enable_thinking": False},
        variables={"enable_thinking": False},
        grown_differs={"late_system": GLM_STRAY},
    ),
    Official(
        "glm4.7",
        "glm4.7",
        None,
        template="GLM-4.7-Flash.jinja",
        options={"thinking": "strip"},
        grown_differs={"late_system": GLM_STRAY},
    ),
    Official(
        "glm4.7_nothink",
        "glm4.7",
        None,
        template="GLM-4.7-Flash.jinja",
        options={"thinking": "strip", "enable_thinking": False},
        variables={"enable_thinking": False},
        grown_differs={"late_system": GLM_STRAY},
    ),
    Official(
        "glm4.7_keep",
        "glm4.7",
        None,
        template="GLM-4.7-Flash.jinja",
        variables={"clear_thinking": False},
        differs={"thought_empty": "an empty thought is kept, the template leaves </think> of it"},
        grown_differs=dict.fromkeys(GLM_NO_THOUGHT, "a turn without thoughts ends one that its prompt began"),
    ),
    Official(
        "mistral_v3",
        "mistral_v3",
        "mistral_nemo",
        template="mistralai-Mistral-Nemo-Instruct-2407.jinja",
        variables=MISTRAL_SPECIAL,
        prepare=with_call_ids(mistral_call_id),
        mended=NEMO_MENDED,
        differs={"system_only": "the template drops a system text after which nobody speaks"},
        grown_differs={
            **MISTRAL_LATER_USERS,
            "three_turns": "the template moves the system text to the last user message; in an episode it stays",
        },
    ),
    Official(
        "mistral_v11",
        "mistral_v11",
        None,
        template="Mistral-Small-3.2-24B-Instruct-2506.jinja",
        variables=MISTRAL_SPECIAL,
        prepare=with_call_ids(mistral_call_id),
        mended={
            "{%- if message.get('tool_calls') %}": "{%- if message.get('tool_calls') %}{{- message['content'] }}",
        },
        grown_differs=MISTRAL_LATER_USERS,
    ),
    Official(
        "devstral",
        "devstral",
        None,
        template="unsloth-mistral-Devstral-Small-2507.jinja",
        variables=MISTRAL_SPECIAL,
        prepare=with_call_ids(mistral_call_id),
        differs={"two_users": "the makers' encoder joins user messages in a row"},
    ),
    Official(
        "ministral3_reasoning",
        "ministral3_reasoning",
        None,
        template="mistralai-Ministral-3-14B-Reasoning-2512.jinja",
        variables=MISTRAL_SPECIAL,
        prepare=with_call_ids(mistral_call_id),
        shown=with_thought_as_a_chunk,
    ),
)
BY_NAME = {row.name: row for row in OFFICIAL}
