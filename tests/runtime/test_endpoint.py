"""A session over a socket is the session, and whatever a client does, its session is freed and nothing else."""

import json
import os
import pickle
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from scripted import HashSampler, HashSession, at_once

from jaxrl.runtime import endpoint as endpoint_module
from jaxrl.runtime.endpoint import Endpoint, open_endpoint
from jaxrl.runtime.remote import RemoteSampler
from jaxrl.runtime.wire import Address, ConnectionLost, pack, pack_error, pack_key, unpack_error, unpack_key

OPEN = {"lease": {"group": None, "seed": 1}}
ASK = {"new": [1, 2], "stop": [], "max_tokens": 3, "temperature": 1.0}


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


# --- the session ----------------------------------------------------------------------------------

turns = st.lists(
    st.fixed_dictionaries(
        {
            "keep": st.floats(0, 1),
            "new": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
            "stop": st.sampled_from([(), (3, 4, 5, 6, 7), ("A", "B", "C", "é")]),
            "max_tokens": st.integers(0, 6),
            "temperature": st.floats(0, 2),
        }
    ),
    min_size=1,
    max_size=5,
)


@given(turns, st.integers(0, 2**64 - 1))
async def test_a_session_over_a_socket_is_the_session(turns: list[dict[str, Any]], seed: int) -> None:
    here = HashSession(seed, 60, at_once)
    async with open_endpoint(HashSampler(60)) as endpoint, RemoteSampler(endpoint.address).session(seed=seed) as there:
        assert (there.capacity, list(there.tokens)) == (60, [])
        for turn in turns:
            keep = round(turn["keep"] * len(here.tokens))
            there.rewind(len(here.tokens))
            there.rewind(keep)
            here.rewind(keep)
            assert list(there.tokens) == here.tokens
            options = {name: turn[name] for name in ("stop", "max_tokens", "temperature")}
            try:
                expected = await here.sample(turn["new"], **options)
            except ValueError as full:
                with pytest.raises(ValueError, match=f"^ContextFull: {full}$"):
                    await there.sample(turn["new"], **options)
            else:
                assert await there.sample(turn["new"], **options) == expected
            assert list(there.tokens) == here.tokens


async def test_what_a_session_is_asked_with_arrives_as_it_was() -> None:
    sampler = HashSampler()
    async with open_endpoint(sampler) as endpoint:
        remote = RemoteSampler(endpoint.address)
        for asked in (
            {"group": None, "seed": 2**64 - 1},
            {"group": ((0, "train", 3), 4), "seed": 0},
            {"group": "a", "seed": 1, "policy": "old"},
        ):
            async with remote.session(**asked):
                assert len(sampler.live) == 1
            assert not sampler.live, "leaving the block waits for the lease to be given back"
            assert sampler.asked[-1] == asked
        with pytest.raises(TypeError, match=r"group=b'x': expected None, a string, a number or a tuple"):
            async with remote.session(group=b"x", seed=1):
                pass


async def test_a_rewind_beyond_the_context_is_refused_here() -> None:
    async with open_endpoint(HashSampler()) as endpoint, RemoteSampler(endpoint.address).session(seed=1) as session:
        await session.sample([1, 2], max_tokens=3)
        with pytest.raises(ValueError, match=r"rewind length=6: expected 0 to 5"):
            session.rewind(6)


class Unheard(Exception):
    """Of this file only."""


def noted(error: Exception) -> Exception:
    error.add_note("in the tick")
    return error


@pytest.mark.parametrize(
    ("thrown", "kind", "text"),
    [
        (noted(ValueError("max_tokens=0: expected 1")), ValueError, "max_tokens=0: expected 1"),
        (TypeError("no"), TypeError, "no"),
        (KeyError("slot"), LookupError, "KeyError: 'slot'"),
        (Unheard("the device is on fire"), RuntimeError, "Unheard: the device is on fire"),
        (ExceptionGroup("two", [Unheard("a"), Unheard("b")]), RuntimeError, "ExceptionGroup: two (2 sub-exceptions)"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_the_samplers_errors_travel_and_the_session_goes_on(
    thrown: Exception, kind: type[Exception], text: str
) -> None:
    async def throw_first(session: HashSession) -> None:
        await trio.lowlevel.checkpoint()
        if not session.tokens and 13 not in seen:
            seen.add(13)
            raise thrown

    seen: set[int] = set()
    async with (
        open_endpoint(HashSampler(act=throw_first)) as endpoint,
        RemoteSampler(endpoint.address).session(seed=1) as session,
    ):
        with pytest.raises(kind) as caught:
            await session.sample([1], max_tokens=2)
        assert (type(caught.value), str(caught.value)) == (kind, text)
        assert getattr(caught.value, "__notes__", []) == getattr(thrown, "__notes__", [])
        assert len((await session.sample([1], max_tokens=2)).tokens) == 2


async def test_a_lease_that_is_refused_is_an_error_of_the_block() -> None:
    async with open_endpoint(HashSampler()) as endpoint:
        with pytest.raises(ValueError, match=r"policy='nobody': expected one of 'us'"):
            async with RemoteSampler(endpoint.address).session(seed=1, policy="nobody"):
                pass


async def forever(session: HashSession) -> None:
    await trio.sleep_forever()


async def test_cancelling_a_turn_frees_the_session_there_and_ends_it_here() -> None:
    sampler = HashSampler(act=forever)
    async with open_endpoint(sampler) as endpoint, RemoteSampler(endpoint.address).session(seed=1) as session:
        with trio.move_on_after(0.02):
            await session.sample([1], max_tokens=2)
        await sampler.until_live(0)
        with pytest.raises(ConnectionLost, match="a turn of it was cancelled or cut off"):
            await session.sample([1], max_tokens=2)


async def test_one_turn_at_a_time() -> None:
    async with (
        open_endpoint(HashSampler(act=forever)) as endpoint,
        RemoteSampler(endpoint.address).session(seed=1) as session,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(lambda: session.sample([1], max_tokens=2))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="sampling already"):
            await session.sample([1], max_tokens=2)
        nursery.cancel_scope.cancel()


async def test_a_sampler_that_keeps_what_it_was_given_before_it_fails_ends_the_session() -> None:
    async def keep(session: HashSession) -> None:
        session.tokens.append(1)
        raise ValueError("half done")

    async with open_endpoint(HashSampler(act=keep)) as endpoint, RemoteSampler(endpoint.address).session(seed=1) as s:
        with pytest.raises(ValueError, match="half done"):
            await s.sample([1], max_tokens=2)
        with pytest.raises(ConnectionLost, match="has no such session any more"):
            await s.sample([1], max_tokens=2)


async def test_I9_closing_the_endpoint_ends_every_session_and_leaves_no_file_open() -> None:
    before, errors = open_files(), []
    sampler = HashSampler(act=forever)

    async def play(address: Address) -> None:
        try:
            async with RemoteSampler(address).session(seed=1) as session:
                await session.sample([1], max_tokens=2)
        except ConnectionLost as error:
            errors.append(str(error))

    async with trio.open_nursery() as nursery:
        async with open_endpoint(sampler) as endpoint:
            for _ in range(20):
                nursery.start_soon(play, endpoint.address)
            await sampler.until_live(20)
        assert not sampler.live
    where = f"the sampling endpoint at 127.0.0.1:{endpoint.address.port}"
    assert len(errors) == 20
    assert all(e.startswith(where) for e in errors)
    assert open_files() == before
    with pytest.raises(ConnectionLost, match=f"{where} cannot be reached"):
        async with RemoteSampler(endpoint.address).session(seed=1):
            pass


# --- clients that misbehave -----------------------------------------------------------------------


async def stranger(endpoint: Endpoint) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", endpoint.address.port)


async def raw(endpoint: Endpoint, *frames: Any) -> trio.SocketStream:
    """A connection that has said these frames, after the token, and read an answer to each."""
    stream = await stranger(endpoint)
    for frame in ({"token": endpoint.address.token}, *frames):
        await stream.send_all(pack(frame))
        assert await stream.receive_some()
    return stream


async def hung_up(stream: trio.SocketStream, said: bytes = b"") -> bool:
    """Whether the endpoint closes the connection; it may do so before all was said."""
    with trio.fail_after(2):
        try:
            if said:
                await stream.send_all(said)
            return await stream.receive_some() == b""
        except trio.BrokenResourceError:
            return True


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


WRONG = {
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "oversize": b"\xff\xff\xff\xff",
    "no JSON": frame(b"{"),
    "no UTF-8": frame(b"\xff\xfe"),
    "no object": frame(b"[1]"),
    "nothing": frame(b""),
    "deep": frame(b"[" * 100_000),
    "pickle": frame(pickle.dumps({"token": "x"})),
    "a huge number": frame(b'{"new": [' + b"9" * 5000 + b"]}"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("said", [(), (OPEN,)], ids=["stranger", "client"])
async def test_garbage_ends_its_connection_and_no_other(wrong: bytes, said: tuple[Any, ...]) -> None:
    sampler = HashSampler()
    async with open_endpoint(sampler) as endpoint, RemoteSampler(endpoint.address).session(seed=1) as other:
        stream = await (raw(endpoint, *said) if said else stranger(endpoint))
        async with stream:
            assert len(sampler.live) == 1 + len(said)
            assert await hung_up(stream, wrong)
        assert len(sampler.live) == 1
        assert len((await other.sample([1], max_tokens=2)).tokens) == 2


BAD = [
    {**ASK, "new": "12"},
    {**ASK, "new": [1.5]},
    {**ASK, "new": [True]},
    {**ASK, "stop": [1, "a"]},
    {**ASK, "max_tokens": None},
    {**ASK, "temperature": "hot"},
    {**ASK, "rewind": []},
    {**ASK, "stop": {"a": 1}},
    {},
]


@pytest.mark.parametrize("request_", BAD, ids=lambda r: json.dumps(r)[:30])
async def test_a_request_that_is_none_never_reaches_the_sampler(request_: Any) -> None:
    async def never(session: HashSession) -> None:
        pytest.fail("it was asked to draw")

    sampler = HashSampler(act=never)
    async with open_endpoint(sampler) as endpoint, await raw(endpoint, OPEN) as stream:
        assert await hung_up(stream, pack(request_))
        assert not sampler.live


@pytest.mark.parametrize(
    "request_",
    [
        {"lease": {"group": {}, "seed": 1}},
        {"lease": {"group": None, "seed": "1"}},
        {"lease": {"group": None, "seed": 1, "policy": 3}},
        {"lease": {"group": [[[[[[[[[[1]]]]]]]]]], "seed": 1}},
        {"lease": 1},
        {"lend": {}},
        {},
    ],
    ids=lambda r: json.dumps(r)[:40],
)
async def test_asking_for_what_there_is_not_ends_the_connection(request_: Any) -> None:
    sampler = HashSampler()
    async with open_endpoint(sampler) as endpoint, await raw(endpoint) as stream:
        assert await hung_up(stream, pack(request_))
        assert sampler.asked == []


async def test_who_asks_again_before_the_answer_is_dropped() -> None:
    sampler = HashSampler(act=forever)
    async with open_endpoint(sampler) as endpoint, await raw(endpoint, OPEN) as stream:
        assert await hung_up(stream, pack(ASK) * 3)
        assert not sampler.live


@pytest.mark.parametrize("token", ["", "0" * 64, None, 5, "é\ud800"])
async def test_without_the_token_nothing_is_said(token: Any) -> None:
    sampler = HashSampler()
    async with open_endpoint(sampler) as endpoint:
        address = Address(endpoint.address.host, endpoint.address.port, token)
        with pytest.raises(ConnectionLost, match=r"127.0.0.1:\d+ refused: the token is not this endpoint's"):
            async with RemoteSampler(address).session(seed=1):
                pass
        assert sampler.asked == []
        async with await stranger(endpoint) as stream:
            assert await hung_up(stream, pack({**OPEN, "padding": "x" * 2000})), "a stranger's frame may not be large"


async def test_a_stranger_who_says_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "CONNECT_SECONDS", 0.02)
    async with open_endpoint(HashSampler()) as endpoint, await stranger(endpoint) as stream:
        assert await hung_up(stream, b"\0\0")


@pytest.mark.parametrize("moment", ["idle", "asking"])
async def test_a_client_that_dies_frees_its_session_at_once(moment: str) -> None:
    sampler = HashSampler(act=forever)
    async with open_endpoint(sampler) as endpoint:
        stream = await raw(endpoint, OPEN)
        if moment == "asking":
            await stream.send_all(pack(ASK))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(sampler.live) == 1
        stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no goodbye
        await stream.aclose()
        await sampler.until_live(0, 0.5)


# --- a connection that is cut ---------------------------------------------------------------------


async def test_a_request_cut_at_any_byte_draws_nothing_and_frees_the_session() -> None:
    drawn: list[int] = []

    async def count(session: HashSession) -> None:
        drawn.append(session.seed)

    sampler = HashSampler(act=count)
    data = pack(ASK)
    async with open_endpoint(sampler) as endpoint:
        for cut in range(len(data)):
            async with await raw(endpoint, OPEN) as stream:
                await stream.send_all(data[:cut])
                await stream.send_eof()
                assert await hung_up(stream)
                assert not sampler.live
        assert drawn == []
        async with await raw(endpoint, OPEN) as stream:
            await stream.send_all(data)
            assert await stream.receive_some()
        assert drawn == [1]


@asynccontextmanager
async def says(*answers: bytes) -> AsyncIterator[Address]:
    """An endpoint that answers every connection with these, one a request, and hangs up."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            for answer in answers:
                await stream.receive_some()
                await stream.send_all(answer)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, serve, [listener])
        yield Address("127.0.0.1", listener.socket.getsockname()[1], "x")
        nursery.cancel_scope.cancel()


def tampered(change: Callable[[dict[str, Any]], Any]) -> bytes:
    answer = {"tokens": [7, 8], "logprobs": [-1.0, -2.0], "versions": [0, 0], "stop": "length", "held": 3}
    change(answer)
    return pack(answer)


async def turn_of(address: Address) -> tuple[int, ...]:
    async with RemoteSampler(address).session(seed=1) as session:
        return (await session.sample([6], max_tokens=2)).tokens


WELCOME, CAPACITY = pack({"welcome": True}), pack({"capacity": 9})


async def test_an_answer_cut_at_any_byte_is_an_error_and_never_a_short_turn() -> None:
    whole = tampered(lambda answer: None)
    stages = [(WELCOME, ()), (CAPACITY, (WELCOME,)), (whole, (WELCOME, CAPACITY))]
    for data, before in stages:
        for cut in range(len(data)):
            async with says(*before, data[:cut]) as address:
                with pytest.raises(ConnectionLost, match=f"the sampling endpoint at 127.0.0.1:{address.port}"):
                    await turn_of(address)
    async with says(WELCOME, CAPACITY, whole) as address:
        assert await turn_of(address) == (7, 8)


@pytest.mark.parametrize(
    "answer",
    [
        tampered(lambda a: a.pop("tokens")),
        tampered(lambda a: a.update(logprobs=[-1.0])),
        tampered(lambda a: a.update(versions=3)),
        tampered(lambda a: a.update(held=2)),
        tampered(lambda a: a.pop("held")),
        pack({"error": {"types": []}}),
        pack({"error": 3}),
        frame(b"7"),
    ],
)
async def test_an_answer_that_is_no_turn_is_an_error(answer: bytes) -> None:
    async with says(WELCOME, CAPACITY, answer) as address:
        with pytest.raises(ConnectionLost):
            await turn_of(address)


# --- the small things -----------------------------------------------------------------------------


async def test_an_address_travels_and_does_not_show_its_secret() -> None:
    async with open_endpoint(HashSampler()) as endpoint, open_endpoint(HashSampler()) as second:
        address = endpoint.address
        assert pickle.loads(pickle.dumps(address)) == address
        assert address.token not in repr(address) + str(address)
        assert len(address.token) == 64
        assert address.token != second.address.token
    with pytest.raises(ValueError, match=r"host='0.0.0.0' listens on every interface and names none"):
        async with open_endpoint(HashSampler(), host="0.0.0.0"):
            pass


@given(st.lists(st.floats(allow_nan=False, width=32)), st.lists(st.integers(0, 2**31 - 1)))
def test_numbers_travel_bit_for_bit(logprobs: list[float], tokens: list[int]) -> None:
    sent = json.loads(pack({"logprobs": logprobs, "tokens": tokens})[4:])
    assert [struct.pack("<d", x) for x in sent["logprobs"]] == [struct.pack("<d", x) for x in logprobs]
    assert sent["tokens"] == tokens


scalars = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)


@given(st.recursive(scalars, lambda parts: st.lists(parts, max_size=3).map(tuple), max_leaves=6).filter(bool))
def test_group_keys_come_back_equal(key: Any) -> None:
    depth = lambda k: 1 + max(map(depth, k), default=0) if isinstance(k, tuple) else 0  # noqa: E731
    if depth(key) <= 8:
        assert unpack_key(json.loads(json.dumps(pack_key(key)))) == key


def test_a_subclass_arrives_as_the_nearest_class_that_is_known_with_its_name() -> None:
    error = unpack_error(json.loads(json.dumps(pack_error(UnicodeError("x")))))
    assert (type(error), str(error)) == (ValueError, "UnicodeError: x")


def test_a_frame_above_the_limit_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.runtime.wire.MAX_FRAME", 10)
    with pytest.raises(ValueError, match=r"a frame of 13 bytes is above the limit of 10"):
        pack({"a": "xxxxx"})
