"""Tools of MCP servers: real ones, over stdio and over HTTP, and some that misbehave."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from chaos import nothing_left

import jaxrl.runtime.mcp
from jaxrl.env import EnvironmentFault
from jaxrl.runtime.mcp import mcp_tools
from jaxrl.tools import CallReport, Tool, ToolFault, report_calls, tool, tool_table
from jaxrl.types import Message, ToolCall

pytestmark = pytest.mark.slow

SERVER = [sys.executable, str(Path(__file__).parent / "mcp_server.py")]


@contextmanager
def http_server() -> Iterator[str]:
    with subprocess.Popen([*SERVER, "http"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as address:
        yield address


BY_HAND = """
import json, sys
pages = json.loads(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"error": {"code": -32601, "message": "what?"}}
    if asked["method"] == "initialize":
        about = {"name": "by hand", "version": "1"}
        answer = {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": about}}
    if asked["method"] == "tools/list":
        page = int((asked.get("params") or {}).get("cursor") or 0)
        after = {"nextCursor": str(page + 1)} if page + 1 < len(pages) else {}
        answer = {"result": {"tools": pages[page], **after}}
    if asked["method"] == "tools/call":
        name = asked["params"]["name"]
        if name == "die":
            sys.exit(3)
        if name == "wait":
            continue
        answer = {"error": {"code": {"refuse": -32602, "break": -32603}[name], "message": "so sorry"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


def by_hand(*pages: list[str]) -> list[str]:
    """A server in the protocol's own words, which starts at once, and whose tools do what their names say."""
    shown = [[{"name": name, "inputSchema": {"type": "object"}} for name in page] for page in pages]
    return [sys.executable, "-c", BY_HAND, json.dumps(shown)]


async def call(tools: list[Tool], *calls: tuple[str, Any], **how: Any) -> CallReport:
    asked = tuple(ToolCall(name, json.dumps(given)) for name, given in calls)
    return await report_calls(tools, Message("assistant", tool_calls=asked), **how)


def contents(report: CallReport) -> list[str]:
    return [result.content for result in report.results]


async def written(note: trio.Path) -> str:
    with trio.fail_after(10):
        while not (await note.exists() and (await note.stat()).st_size):  # noqa: ASYNC110 - another process writes it
            await trio.sleep(0.01)
    return await note.read_text()


WHERE = pytest.mark.parametrize("where", ["stdio", "http"])


@WHERE
async def test_a_servers_tools_are_tools(where: str, url: str, tmp_path: Path) -> None:
    async with mcp_tools(command=SERVER) if where == "stdio" else mcp_tools(url=url) as tools:
        table = tool_table(tools)
        assert list(table) == ["add", "wait", "fail", "show", "environment", "die"]
        assert table["add"].description == "Add two numbers."
        schema = table["add"].parameters_schema
        assert schema["required"] == ["a"]
        assert schema["properties"]["b"]["description"] == "the other"
        assert (schema["properties"]["b"]["minimum"], schema["properties"]["b"]["default"]) == (0, 2)

        report = await call(tools, ("add", {"a": 1}), ("add", {"a": 1, "b": 5}), parallel=True)
        assert contents(report) == ["3", "6"]

        report = await call(tools, ("fail", {}), ("add", {"a": "x"}), ("add", [1]), ("show", {"what": "refused"}))
        assert all(result.is_error for result in report.results)
        said = contents(report)
        assert said[0].startswith("Error: Error executing tool fail")
        assert "valid integer" in said[1]
        assert said[2:] == ["Error: arguments must be a JSON object, got [1]", "Error: not today"]

        report = await call(tools, *(("show", {"what": what}) for what in ("parts", "structured", "nothing")))
        assert contents(report) == [
            "first\n[image: image/png]\n[audio: audio/wav]\nin a\n[resource: file:///b.bin]\n"
            "[resource_link: file:///c]\nlast\n",
            '{"é": [1]}',
            "",
        ]

        note = trio.Path(tmp_path) / "note"
        report = await call(
            tools, ("wait", {"seconds": 60, "note": str(note)}), ("wait", {"seconds": 0}), call_seconds=0.5
        )
        assert contents(report) == ["Error: wait gave no answer within 0.5 s and was stopped", "waited 0"]
        assert await written(note) == "cancelled", "the server was told"


async def test_I13_a_server_that_dies_is_a_fault_of_its_tools_and_not_of_the_block() -> None:
    with nothing_left():
        async with mcp_tools(command=SERVER) as tools:
            for name in ("die", "add"):
                with pytest.raises(
                    ToolFault, match=rf"'{name}' failed.*MCP server '.*mcp_server.py' failed: Connection"
                ):
                    await call(tools, (name, {"a": 1} if name == "add" else {}))
            await trio.sleep(0.01)


async def test_I13_a_server_at_a_url_that_dies_is_a_fault_too_and_leaving_is_quiet() -> None:
    with http_server() as url, nothing_left():
        async with mcp_tools(url=f"{url}?key=secret") as tools:
            with pytest.raises(
                ToolFault, match=r"'die' failed.*MCP server http://127.0.0.1:\d+/mcp failed: Connection"
            ):
                await call(tools, ("die", {}))
            await trio.sleep(0.05)
            with pytest.raises(ToolFault, match=r"MCP server http://127.0.0.1:\d+/mcp is gone: \w+Error\("):
                await call(tools, ("add", {"a": 1}))


@WHERE
@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_I9_the_server_is_gone_however_the_block_is_left(where: str, how: str, url: str) -> None:
    tools: list[Tool] = []
    options: Any = {"command": by_hand(["wait", "refuse"])} if where == "stdio" else {"url": url}
    with nothing_left():
        if how == "error":
            with pytest.RaisesGroup(pytest.RaisesExc(KeyError, match="mine")):
                async with mcp_tools(**options) as tools:
                    raise KeyError("mine")
        else:
            with trio.CancelScope() as scope:
                async with mcp_tools(**options) as tools:
                    scope.deadline = trio.current_time() + 0.1
                    await call(tools, ("wait", {"seconds": 60}), ("wait", {"seconds": 60}), parallel=True)
            assert scope.cancelled_caught
    with pytest.raises(ToolFault, match="is gone: its `mcp_tools` block has been left"):
        await call(tools, (tools[0].name, {}))


async def test_the_process_gets_its_environment_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    async with mcp_tools(command=SERVER, env={"GREETING": "hello"}, cwd=tmp_path, prefix="here_") as tools:
        (result,) = (await call(tools, ("here_environment", {}))).results
        seen = json.loads(result.content)
    assert (seen["greeting"], seen["secret"], Path(seen["cwd"]).name) == ("hello", None, tmp_path.name)


# --- servers that misbehave ----------------------------------------------------------------------


async def test_a_server_of_an_older_protocol_that_lists_in_pages_and_refuses_by_the_protocol() -> None:
    async with mcp_tools(command=by_hand(["refuse"], ["break"])) as tools:
        assert [(each.name, each.description, each.parameters_schema) for each in tools] == [
            ("refuse", "", {"type": "object"}),
            ("break", "", {"type": "object"}),
        ]
        assert contents(await call(tools, ("refuse", {}))) == ["Error: so sorry"]
        with pytest.raises(ToolFault, match=r"tool 'break' failed: EnvironmentFault: MCP server .* failed: so sorry"):
            await call(tools, ("break", {}))


async def test_P07_tools_named_alike_are_refused_and_a_prefix_tells_servers_apart() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="two tools are named 'refuse'")):
        async with mcp_tools(command=by_hand(["refuse", "refuse"])):
            pass

    @tool
    def refuse() -> str:
        """Refuse."""
        return "mine"

    async with mcp_tools(command=by_hand(["refuse"]), prefix="theirs_") as tools:
        report = await call([refuse, *tools], ("refuse", {}), ("theirs_refuse", {}))
        assert contents(report) == ["mine", "Error: so sorry"]


@pytest.mark.parametrize(
    ("command", "teaches"),
    [
        (["no-such-program", "-x"], r"MCP server 'no-such-program -x' did not start: FileNotFoundError"),
        (["true"], r"MCP server 'true' did not start: MCPError\(.*Connection closed"),
        (["cat"], r"MCP server 'cat' did not start: MCPError\(.*Method not found"),
        (["sleep", "60"], r"did not list its tools within 0.2 s"),  # nor does it end with its input
    ],
)
async def test_I9_a_server_that_does_not_start_is_told_and_leaves_nothing(command: list[str], teaches: str) -> None:
    with nothing_left(), pytest.RaisesGroup(pytest.RaisesExc(EnvironmentFault, match=teaches)):
        async with mcp_tools(command=command, start_seconds=0.2):
            pass


class Sessions:
    """A server of sessions over HTTP, by hand. It answers no DELETE."""

    def __init__(self) -> None:
        self.heads: list[str] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        heard = b""
        async for chunk in stream:
            heard += chunk
            while b"\r\n\r\n" in heard:
                head, _, rest = heard.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                size = int(length[1]) if length else 0
                if len(rest) < size:
                    break
                self.heads.append(head.decode())
                await self._answer(stream, head, rest[:size])
                heard = rest[size:]

    async def _answer(self, stream: trio.SocketStream, head: bytes, body: bytes) -> None:
        if head.startswith(b"DELETE"):
            await trio.sleep_forever()
        asked = json.loads(body) if body else {}
        about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": ABOUT}
        results = {"initialize": about, "tools/list": {"tools": []}}
        known = asked.get("method") in results
        answer = {"result": results[asked["method"]]} if known else {"error": {"code": -32601, "message": "what?"}}
        if head.startswith(b"GET"):
            reply, said = "405 No", b""
        elif "id" not in asked:
            reply, said = "202 Accepted", b""
        else:
            reply, said = "200 OK", json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}).encode()
        headers = f"content-type: application/json\r\ncontent-length: {len(said)}\r\nmcp-session-id: s1"
        await stream.send_all(f"HTTP/1.1 {reply}\r\n{headers}\r\n\r\n".encode() + said)


ABOUT = {"name": "by hand", "version": "1"}


async def test_I9_a_server_that_does_not_take_leave_is_left_and_headers_are_sent(monkeypatch: Any) -> None:
    monkeypatch.setattr(jaxrl.runtime.mcp, "CLOSE_SECONDS", 0.1)
    sessions = Sessions()
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, sessions.serve, listeners)
        port = listeners[0].socket.getsockname()[1]
        with trio.fail_after(20):
            async with mcp_tools(url=f"http://127.0.0.1:{port}/mcp", headers={"Authorization": "Bearer x"}) as tools:
                assert tools == []
        nursery.cancel_scope.cancel()
    assert sessions.heads[-1].startswith("DELETE /mcp")
    assert all("authorization: bearer x" in head.lower() for head in sessions.heads)


async def test_nobody_at_a_url_is_told() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(EnvironmentFault, match="MCP server http://127.0.0.1:1/ did not start")):
        async with mcp_tools(url="http://me:secret@127.0.0.1:1/?key=secret"):
            pass


@pytest.mark.parametrize(
    ("options", "teaches"),
    [
        ({}, "command=None, url=None: give one of them"),
        ({"command": ["x"], "url": "http://x"}, "give one of them"),
        ({"command": "python server.py"}, "expected a program and its arguments"),
        ({"command": []}, "expected a program and its arguments"),
        ({"url": "http://x", "env": {}}, "env and cwd are for a server that `command` starts"),
        ({"command": ["x"], "headers": {}}, "headers are for a server at a url"),
        ({"command": ["x"], "start_seconds": 0}, "start_seconds=0: expected a positive number"),
    ],
)
async def test_I12_options_that_cannot_be_meant_are_refused(options: dict[str, Any], teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        async with mcp_tools(**options):
            pass


def test_without_the_extra_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    spec = importlib.util.spec_from_file_location("without_mcp", jaxrl.runtime.mcp.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ModuleNotFoundError, match=r"'mcp' is not installed: pip install 'jaxrl\[mcp\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_nothing_else_needs_the_extra() -> None:
    root = Path(jaxrl.runtime.mcp.__file__).parents[2]
    files = [path for folder in ("jaxrl", "envs", "recipes") for path in (root / folder).rglob("*.py")]
    needs = re.compile(
        r"^\s*(from|import)\s+(jaxrl\.runtime\.)?mcp\b|^from jaxrl.runtime import .*\bmcp\b", re.MULTILINE
    )
    assert [path.name for path in files if needs.search(path.read_text())] == ["mcp.py"]
