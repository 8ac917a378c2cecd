"""Conversations that every renderer must write exactly as the published template does."""

from jaxrl.types import Message, ToolCall, ToolSpec

SEARCH = ToolSpec(
    "search",
    "Search the wiki. Returns up to 3 passages — ranked.",
    {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "what to look for"}, "k": {"type": "integer"}},
        "required": ["query"],
    },
)
CLOCK = ToolSpec("clock", "Tell the time <UTC> & zone 'Z' in \"ISO\".", {"type": "object", "properties": {}})
TOOLS = (SEARCH, CLOCK)


def s(text: str) -> Message:
    return Message("system", text)


def u(text: str) -> Message:
    return Message("user", text)


def a(text: str = "", *calls: ToolCall, thinking: str | None = None) -> Message:
    return Message("assistant", text, thinking=thinking, tool_calls=calls)


def t(text: str) -> Message:
    return Message("tool", text)


def call(name: str = "search", arguments: str = '{"query": "Paris", "k": 2}') -> ToolCall:
    return ToolCall(name, arguments)


CODE = 'def f(x):\n    """Doc."""\n\treturn {"a": [x, x**2]}  # done\n\n\n'

CONVERSATIONS: dict[str, tuple[tuple[Message, ...], tuple[ToolSpec, ...]]] = {
    "user": ((u("Hello"),), ()),
    "system_user": ((s("Be brief."), u("Hello")), ()),
    "empty_system": ((s(""), u("Hello")), ()),
    "empty_user": ((u(""),), ()),
    "space_user": ((u("   "),), ()),
    "newlines_user": ((u("\n\n"),), ()),
    "leading_newline": ((u("\nHello"),), ()),
    "trailing_newline": ((u("Hello\n"),), ()),
    "trailing_newlines_space": ((u("Hello \n\n "),), ()),
    "leading_space": ((u("  Hello"),), ()),
    "tabs_crlf": ((u("a\tb\r\nc\r\n"),), ()),
    "digits": ((u("1234567890 3.14159 -7 1e-5"),), ()),
    "unicode": ((u("Grüße, naïve café — “quoted” … ½ ≠ ∑ Ωμέγα Привет"),), ()),
    "cjk": ((u("今天天气怎么样？ 東京は晴れ。 안녕하세요"),), ()),
    "emoji": ((u("👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 ok🙂"),), ()),
    "rtl_combining": ((u("مرحبا שלום é"),), ()),
    "code": ((s("You write Python."), u(CODE)), ()),
    "json_text": ((u('{"a": "b\\"c", "d": [1, 2, {"e": null}]}'),), ()),
    "html": ((u("<b>bold</b> & <i>it's</i> <tools></tools>"),), ()),
    "long": ((u("All work and no play. " * 60),), ()),
    "two_turns": ((u("Hi"), a("Hello!"), u("Bye")), ()),
    "three_turns": ((s("S"), u("1"), a("2"), u("3"), a("4"), u("5")), ()),
    "assistant_spaces": ((u("Hi"), a("  Hello \n"), u("Bye")), ()),
    "assistant_empty": ((u("Hi"), a(""), u("Bye")), ()),
    "assistant_unicode": ((u("Hi"), a("Ünï 🙂"), u("今")), ()),
    "late_system": ((u("Hi"), a("Hello"), s("Now be formal."), u("Bye")), ()),
    "two_users": ((u("Hi"), u("Are you there?")), ()),
    "system_only": ((s("Say something."),), ()),
    "tools": ((u("What time is it?"),), TOOLS),
    "tools_system": ((s("Use tools."), u("What time is it?")), TOOLS),
    "tools_empty_system": ((s(""), u("What time is it?")), (CLOCK,)),
    "one_call": ((u("Paris?"), a("", call()), t("A city.")), TOOLS),
    "text_and_call": ((u("Paris?"), a("Let me look.", call()), t("A city.")), TOOLS),
    "two_calls": ((u("?"), a("", call(), call("clock", "{}")), t("A city."), t("12:00")), TOOLS),
    "text_two_calls": ((u("?"), a("Both:", call(), call("clock", "{}")), t("x"), t("y"), u("And?")), TOOLS),
    "tool_loop": ((s("S"), u("?"), a("", call()), t("1"), a("", call("clock", "{}")), t("2")), TOOLS),
    "tool_loop_done": ((u("?"), a("", call()), t("1"), a("It is 1."), u("Thanks"), a("np"), u("Again?")), TOOLS),
    "tool_whitespace": ((u("?"), a("", call()), t("\n  1 \n\n"), a("ok"), u("x")), TOOLS),
    "tool_empty_result": ((u("?"), a("", call()), t("")), TOOLS),
    "three_results": ((u("?"), a("", call(), call(), call()), t("1"), t("2\n"), t("✓")), TOOLS),
    "call_unicode": ((u("?"), a("", call(arguments='{"query": "Zürich 🏔 \\"x\\" \\n"}')), t("1")), TOOLS),
    "call_nested": ((u("?"), a("", call(arguments='{"query": {"a": [1, 2.5, true, null]}}')), t("1")), TOOLS),
    "thought_old": ((u("Hi"), a("Hello", thinking="They greet."), u("Bye")), ()),
    "thought_loop": ((u("?"), a("", call(), thinking="Look it up."), t("1")), TOOLS),
    "thought_loop_text": ((u("?"), a("Wait.", call(), thinking="Look\n\nit up. "), t("1"), t("2")), TOOLS),
    "thoughts_mixed": (
        (u("1"), a("2", thinking="x"), u("3"), a("", call(), thinking="y"), t("4"), a("", call()), t("5")),
        TOOLS,
    ),
    "thought_newlines": ((u("?"), a("\n\nText", call(), thinking="\nhm\n"), t("1")), TOOLS),
    "thought_empty": ((u("?"), a("Text", call(), thinking=""), t("1")), TOOLS),
}


def uses_tools(name: str) -> bool:
    """Whether a conversation needs a template that knows tools."""
    messages, tools = CONVERSATIONS[name]
    return bool(tools) or any(m.tool_calls or m.role == "tool" for m in messages)


def has_thoughts(name: str) -> bool:
    """Whether a conversation has a think block."""
    return any(m.thinking is not None for m in CONVERSATIONS[name][0])
