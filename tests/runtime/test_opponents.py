"""Opponents: a function, a real HTTP server that misbehaves, and a frozen policy whose context only grows."""

import json
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import pytest
import trio

from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import EnvironmentFault
from jaxrl.runtime.opponents import Frozen, Hosted, Scripted, current_sampler, sampling_from
from jaxrl.types import Message, Sample, ToolCall

ASK = (Message("system", "You play."), Message("user", "9 stones"))
KEY = "sk-very/secret-0123456789"


def shout(messages: Sequence[Message]) -> Message:
    return Message("assistant", messages[-1].content.upper())


async def test_a_scripted_opponent_says_what_its_function_says() -> None:
    opponent = pickle.loads(pickle.dumps(Scripted(shout)))
    assert await opponent.reply(ASK) == Message("assistant", "9 STONES")
    await opponent.close()


# --- a server over a real socket -----------------------------------------------------------------


Answer = Callable[[trio.SocketStream], Awaitable[None]]


@dataclass
class Server:
    """Answers request after request by a list; the last answer repeats."""

    answers: Sequence[Answer]
    url: str = ""
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    async def handle(self, stream: trio.SocketStream) -> None:
        connection, body = h11.Connection(h11.SERVER), bytearray()
        head: h11.Request | None = None
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some())
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return  # the client went away
        assert head is not None
        headers = {name.decode(): value.decode() for name, value in head.headers}
        self.requests.append((head.target.decode(), headers, json.loads(body)))
        self.times.append(trio.current_time())
        try:
            await self.answers[min(len(self.requests), len(self.answers)) - 1](stream)
        except trio.BrokenResourceError:
            return  # the client went away


@asynccontextmanager
async def serving(*answers: Answer) -> AsyncIterator[Server]:
    server = Server(answers)
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, server.handle, 0, host="127.0.0.1"))
        server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/v1"
        yield server
        nursery.cancel_scope.cancel()


def status(code: int, content: bytes, *headers: str, missing: int = 0) -> Answer:
    """A response that promises `missing` bytes more than it sends."""

    async def answer(stream: trio.SocketStream) -> None:
        lines = [f"HTTP/1.1 {code} x", f"Content-Length: {len(content) + missing}", "Connection: close", *headers]
        await stream.send_all("\r\n".join([*lines, "", ""]).encode() + content)
        await stream.aclose()

    return answer


def completion(text: Any, reason: Any = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": reason}]}).encode()


def says(text: Any, reason: Any = "stop") -> Answer:
    return status(200, completion(text, reason))


async def hang(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def hang_up(stream: trio.SocketStream) -> None:
    await stream.aclose()


async def drip(stream: trio.SocketStream) -> None:
    """One byte at a time, each soon enough to please a timeout that counts from byte to byte."""
    await stream.send_all(b"HTTP/1.1 200 x\r\nContent-Length: 100000\r\n\r\n")
    while True:
        await stream.send_all(b" ")
        await trio.sleep(0.02)


async def flood(stream: trio.SocketStream) -> None:
    await stream.send_all(b"HTTP/1.1 200 x\r\nConnection: close\r\n\r\n")
    while True:
        await stream.send_all(b" " * 65536)


def hosted(server: Server, **changes: Any) -> Hosted:
    return Hosted(
        server.url, **({"model": "m", "timeout": 5.0, "retries": 2, "patience": 20.0, "backoff": 0.01} | changes)
    )


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


async def test_a_hosted_opponent_asks_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPONENT_KEY", KEY + "\n")
    async with serving(says("I take 1.")) as server:
        opponent = hosted(server, api_key_env="OPPONENT_KEY", max_tokens=9, temperature=0.5)
        opponent = pickle.loads(pickle.dumps(opponent))
        assert await opponent.reply(ASK) == Message("assistant", "I take 1.")
        await opponent.close()
    ((target, headers, body),) = server.requests
    assert target == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "You play."}, {"role": "user", "content": "9 stones"}],
        "max_tokens": 9,
        "temperature": 0.5,
    }


async def test_without_a_key_none_is_sent_and_the_server_chooses_what_is_not_given() -> None:
    async with serving(says("ok")) as server:
        await hosted(server).reply(ASK)
    ((_, headers, body),) = server.requests
    assert "authorization" not in headers
    assert body.keys() == {"model", "messages"}


@pytest.mark.parametrize("bad", [status(429, b"slow down"), status(500, b""), status(503, b"<html>"), hang_up])
async def test_what_may_pass_is_tried_again(bad: Answer) -> None:
    async with serving(bad, bad, says("at last")) as server:
        assert (await hosted(server).reply(ASK)).content == "at last"
    assert len(server.requests) == 3


async def test_a_cut_body_is_tried_again_and_never_read_as_a_reply() -> None:
    whole = completion("I take 1.")
    cut, padded = status(200, whole[:30], missing=len(whole) - 30), status(200, whole, missing=10)
    async with serving(cut, padded, says("whole")) as server:
        assert (await hosted(server).reply(ASK)).content == "whole"
    async with serving(cut) as server:
        with pytest.raises(EnvironmentFault, match=r"no answer after 3 failed attempts .* RemoteProtocolError"):
            await hosted(server).reply(ASK)


async def test_when_retries_run_out_the_fault_shows_the_last_answer() -> None:
    async with serving(status(500, b"first"), status(502, b"the gateway is down")) as server:
        with pytest.raises(EnvironmentFault, match=r"opponent 'm' at http.*retries=2.*502: the gateway is down"):
            await hosted(server).reply(ASK)
    assert len(server.requests) == 3


async def test_a_server_that_is_not_there_is_a_fault() -> None:
    async with serving(says("ok")) as server:
        pass
    with pytest.raises(EnvironmentFault, match=r"no answer after 2 failed attempts .* ConnectError"):
        await hosted(server, retries=1).reply(ASK)


@pytest.mark.parametrize("slow", [hang, drip])
async def test_an_attempt_is_bounded_as_a_whole(slow: Answer) -> None:
    async with serving(slow, says("in time")) as server:
        assert (await hosted(server, timeout=0.3).reply(ASK)).content == "in time"
    assert 0.25 <= server.times[1] - server.times[0] < 3  # the server sees the first attempt a little late


async def test_all_attempts_together_are_bounded() -> None:
    began = trio.current_time()
    async with serving(hang) as server:
        with pytest.raises(EnvironmentFault, match=r"patience=0\.5.*no whole response within 0\.2 s"):
            await hosted(server, timeout=0.2, retries=1000, patience=0.5).reply(ASK)
        with pytest.raises(EnvironmentFault, match="not even one ended in time"):
            await hosted(server, timeout=30.0, patience=0.2).reply(ASK)
    assert trio.current_time() - began < 5


async def test_the_server_may_say_how_long_to_wait() -> None:
    async with serving(status(429, b"", "Retry-After: 0.4"), says("ok")) as server:
        await hosted(server).reply(ASK)
    assert server.times[1] - server.times[0] >= 0.4
    async with serving(status(429, b"", "Retry-After: Wed, 21 Oct 2065 07:28:00 GMT"), says("ok")) as server:
        await hosted(server).reply(ASK)
    assert server.times[1] - server.times[0] < 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (status(200, b"{"), r"no chat completion with one choice \(JSONDecodeError\): '\{'"),
        (status(200, completion("caf\u00e9").replace(b"\\u00e9", b"\xe9")), r"\(UnicodeDecodeError\)"),
        (status(200, b"[" * 100_000), r"\(RecursionError\)"),
        (status(200, b'{"choices": []}'), r"\(ValueError\)"),
        (status(200, b'{"choices": "x"}'), r"\(TypeError\)"),
        (status(200, b'{"error": "overloaded"}'), r"\(KeyError\): .*overloaded"),
        (status(200, b"null"), r"\(TypeError\)"),
        (says("I take", "length"), r"finish_reason='length': expected 'stop'"),
        (says("", "content_filter"), "finish_reason='content_filter'"),
        (says("text", None), "finish_reason=None"),
        (says(None), "content of the reply is None"),
        (says(" \n"), r"content of the reply is ' \\n'"),
        (says(["parts"]), "content of the reply is"),
        (says("half \ud83d"), "half a surrogate pair"),
        (status(404, b"no model 'm'"), "status 404: no model 'm' .not tried again"),
        (status(302, b"", "Location: /elsewhere"), "status 302"),
        (flood, "longer than 4194304 bytes"),
    ],
)
async def test_what_is_no_whole_reply_is_a_fault_at_once(answer: Answer, why: str) -> None:
    async with serving(answer) as server:
        with pytest.raises(EnvironmentFault, match=why) as caught:
            await hosted(server).reply(ASK)
    assert len(server.requests) == 1
    assert "opponent 'm' at http://127.0.0.1" in str(caught.value)
    assert len(str(caught.value)) < 500


async def test_cancellation_goes_through() -> None:
    async with serving(hang) as server:
        with trio.move_on_after(0.2) as scope:
            await hosted(server).reply(ASK)
        assert scope.cancelled_caught


async def test_many_ask_at_once() -> None:
    replies = []

    async def ask() -> None:
        replies.append((await hosted(server).reply(ASK)).content)

    async with serving(says("ok")) as server, trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(ask)
    assert replies == ["ok"] * 30


@pytest.mark.parametrize(
    "echo",
    [
        KEY,
        json.dumps({"error": f"bad key {KEY}"}).replace("/", "\\/"),  # as some servers escape
        f"bad key {KEY[:12]}",
        "x" * 290 + KEY,
    ],
)
@pytest.mark.parametrize("code", [200, 401, 500])
async def test_a_key_that_the_server_repeats_is_in_no_error(
    echo: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPPONENT_KEY", KEY)
    async with serving(status(code, echo.encode())) as server:
        opponent = hosted(server, api_key_env="OPPONENT_KEY")
        with pytest.raises(EnvironmentFault, match="repeats the API key") as caught:
            await opponent.reply(ASK)
    told = "".join(traceback.format_exception(caught.value)) + repr(opponent) + repr(pickle.dumps(opponent))
    assert not any(KEY[i : i + 8] in told for i in range(len(KEY) - 7))


async def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    opponent = Hosted("http://127.0.0.1:9/v1", "m", api_key_env="OPPONENT_KEY")
    monkeypatch.delenv("OPPONENT_KEY", raising=False)
    with pytest.raises(ValueError, match=r"api_key_env='OPPONENT_KEY': .*export it"):
        await opponent.reply(ASK)
    for key in ("hunter\n22", "huntér22", "hunter 22"):
        monkeypatch.setenv("OPPONENT_KEY", key)
        with pytest.raises(ValueError, match="no HTTP header can hold") as caught:
            await opponent.reply(ASK)
        assert "hunt" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url",
    ["https://me:hunter22@example.com/v1", "https://example.com/v1?key=hunter22", "https://example.com/#hunter22"],
)
def test_a_url_that_could_hold_a_secret_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ValueError, match="expected the bare base URL") as caught:
        Hosted(url, "m")
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("url", ["example.com/v1", "ftp://example.com", "https://", "http://exa\x00mple"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected the bare base URL, such as https://api\.example\.com/v1"):
        Hosted(url, "m")


@pytest.mark.parametrize(
    "wrong",
    [{"timeout": 0.0}, {"patience": float("inf")}, {"backoff": -1.0}, {"retries": -1}, {"timeout": float("nan")}],
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Hosted("http://127.0.0.1/v1", "m", **wrong)


async def test_tool_calls_are_not_sent_to_a_hosted_opponent() -> None:
    called = Message("assistant", "", tool_calls=(ToolCall("look", "{}"),))
    with pytest.raises(ValueError, match="'assistant' with 1 tool calls"):
        await Hosted("http://127.0.0.1:9/v1", "m").reply([*ASK, called])


# --- a frozen policy -----------------------------------------------------------------------------

BYTES = byte_tokenizer()
RENDERER = renderer_for(BYTES)
END = BYTES.special("<|im_end|>")


@dataclass
class StubSession:
    """Draws the given turns; keeps what it was given."""

    turns: list[tuple[int, ...]]
    capacity: int
    tokens: list[int] = field(default_factory=list)
    given: list[tuple[int, ...]] = field(default_factory=list)
    rewinds: list[int] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)

    async def sample(
        self,
        new_tokens: Sequence[int],
        *,
        stop: Sequence[int] | Sequence[str] = (),
        max_tokens: int,
        temperature: float = 1.0,
    ) -> Sample:
        await trio.lowlevel.checkpoint()
        if not self.turns:
            await trio.sleep_forever()  # no place is free
        self.given.append(tuple(new_tokens))
        self.budgets.append(max_tokens)
        drawn = self.turns.pop(0)[:max_tokens]
        self.tokens += [*new_tokens, *drawn]
        return Sample(drawn, (0.0,) * len(drawn), (0,) * len(drawn), "stop" if drawn[-1] in stop else "length")

    def rewind(self, length: int) -> None:
        if length < len(self.tokens):
            self.rewinds.append(length)
        del self.tokens[length:]


class StubSampler:
    """One kind of session; notes how each was leased and how many are out."""

    def __init__(self, *turns: str | tuple[int, ...], capacity: int = 10_000) -> None:
        self._turns = [(*BYTES.encode(t), END) if isinstance(t, str) else t for t in turns]
        self._capacity = capacity
        self.leases: list[dict[str, Any]] = []
        self.sessions: list[StubSession] = []
        self.live = 0

    @asynccontextmanager
    async def session(self, **how: Any) -> AsyncIterator[StubSession]:
        self.leases.append(how)
        self.sessions.append(StubSession(list(self._turns), self._capacity))
        self.live += 1
        try:
            yield self.sessions[-1]
        finally:
            self.live -= 1


async def test_a_frozen_opponent_extends_one_session_turn_by_turn() -> None:
    sampler = StubSampler("I take 1", "I take 2")
    opponent = pickle.loads(pickle.dumps(Frozen(RENDERER, max_tokens=50)))
    with sampling_from(sampler):
        first = await opponent.reply(ASK)
        second = await opponent.reply([*ASK, first, Message("user", "5 stones")])
    assert (first, second) == (Message("assistant", "I take 1"), Message("assistant", "I take 2"))
    (session,) = sampler.sessions
    assert session.given == [RENDERER.open(ASK), RENDERER.extend([Message("user", "5 stones")], after=RENDERER.stop)]
    assert session.rewinds == []
    assert sampler.live == 1
    await opponent.close()
    await opponent.close()
    assert sampler.live == 0
    with sampling_from(sampler), pytest.raises(RuntimeError, match=r"reply\(\) after close\(\)"):
        await opponent.reply(ASK)


async def test_ids_that_the_tokenizer_would_not_choose_stay_as_sampled() -> None:
    spelled = tuple(b"user\n")
    assert BYTES.encode("user\n") != spelled
    sampler = StubSampler((*spelled, END), "b")
    opponent = Frozen(RENDERER, max_tokens=50)
    with sampling_from(sampler):
        first = await opponent.reply(ASK)
        await opponent.reply([*ASK, first, Message("user", "on")])
    opening = RENDERER.open(ASK)
    assert tuple(sampler.sessions[0].tokens[len(opening) :][: len(spelled)]) == spelled
    assert sampler.sessions[0].rewinds == []
    await opponent.close()


async def test_thoughts_that_the_game_does_not_show_stay_in_the_context() -> None:
    think, end_think = BYTES.special("<think>"), BYTES.special("</think>")
    renderer = renderer_for(BYTES, "qwen3")
    sampler = StubSampler((think, *b"\nhm\n", end_think, *b"\n\nyes", END), "b")
    opponent = Frozen(renderer, max_tokens=50)
    with sampling_from(sampler):
        first = await opponent.reply(ASK)
        assert first.thinking is not None
        await opponent.reply([*ASK, Message("assistant", first.content), Message("user", "on")])
    assert sampler.sessions[0].given[1] == renderer.extend([Message("user", "on")], after=renderer.stop)
    await opponent.close()


async def test_a_conversation_that_was_rewritten_keeps_what_it_shares() -> None:
    sampler = StubSampler("a", "b")
    opponent = Frozen(RENDERER, max_tokens=50)
    other = (ASK[0], Message("user", "9 pebbles"))
    with sampling_from(sampler):
        await opponent.reply(ASK)
        await opponent.reply(other)
    (session,) = sampler.sessions
    (shared,) = session.rewinds
    assert shared > len(RENDERER.open(ASK)) / 2
    assert tuple(session.tokens) == (*RENDERER.open(other), *BYTES.encode("b"), END)
    assert session.given[1] == RENDERER.open(other)[shared:]
    await opponent.close()


async def test_a_turn_cut_by_its_budget_is_a_move_and_is_closed_in_the_context() -> None:
    sampler = StubSampler("abcdef", "b")
    opponent = Frozen(RENDERER, max_tokens=3)
    with sampling_from(sampler):
        first = await opponent.reply(ASK)
        assert first == Message("assistant", "abc")
        await opponent.reply([*ASK, first, Message("user", "on")])
    assert sampler.sessions[0].given[1] == RENDERER.extend([Message("user", "on")], after=())
    await opponent.close()


async def test_the_session_is_seeded_by_the_episode_and_names_its_adapter() -> None:
    leases = []
    for episode, own, adapter in [(1, 0, None), (1, 0, None), (2, 0, None), (1, 1, None), (1, 0, "step-40")]:
        sampler = StubSampler("a")
        opponent = Frozen(RENDERER, max_tokens=9, seed=own, adapter=adapter)
        with sampling_from(sampler, seed=episode):
            await opponent.reply(ASK)
        await opponent.close()
        leases += sampler.leases
    seeds = [lease["seed"] for lease in leases]
    assert seeds[0] == seeds[1] == seeds[4]
    assert len(set(seeds)) == 3
    assert [lease.get("policy") for lease in leases] == [None, None, None, None, "step-40"]
    assert leases[0].keys() == {"group", "seed"}, "a sampler that knows no policies is not asked for one"


async def test_tasks_of_the_block_find_the_sampler_and_others_do_not() -> None:
    sampler, opponent, heard = StubSampler("a"), Frozen(RENDERER, max_tokens=9), []

    async def episode() -> None:
        heard.append(await opponent.reply(ASK))

    async with trio.open_nursery() as nursery:
        with sampling_from(sampler):
            nursery.start_soon(episode)
    assert [m.content for m in heard] == ["a"]
    await opponent.close()
    assert current_sampler.get(None) is None
    with pytest.raises(RuntimeError, match=r"with sampling_from\(sampler\):"):
        await Frozen(RENDERER, max_tokens=9).reply(ASK)


async def test_the_last_room_is_used_and_none_is_a_fault() -> None:
    length = len(RENDERER.open(ASK))
    sampler = StubSampler("abcdef", capacity=length + 2)
    opponent = Frozen(RENDERER, max_tokens=9)
    with sampling_from(sampler):
        first = await opponent.reply(ASK)
        assert (first.content, sampler.sessions[0].budgets) == ("ab", [2])
        with pytest.raises(EnvironmentFault, match=f"its sampler holds {length + 2}"):
            await opponent.reply([*ASK, first, Message("user", "on")])
    await opponent.close()


async def test_a_sampler_without_a_free_place_is_a_fault_and_no_deadlock(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sampler, opponent = StubSampler(), Frozen(RENDERER, max_tokens=9, timeout=40)
    began = trio.current_time()
    with sampling_from(sampler), pytest.raises(EnvironmentFault, match="no turn within 40 s: when every place"):
        await opponent.reply(ASK)
    assert trio.current_time() - began == pytest.approx(40)
    await opponent.close()
    assert sampler.live == 0


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"max_tokens": 1, "timeout": 0.0}])
def test_a_frozen_opponent_without_a_budget_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Frozen(RENDERER, **wrong)
