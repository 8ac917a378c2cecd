"""Tools of a Model Context Protocol server, for as long as a block: a process on this machine, or a URL.

    async with mcp_tools(command=["uvx", "some-mcp-server"]) as tools:
        ...  # environments made in here may call them

Knows `jaxrl.tools` and the package `mcp` (the extra `mcp`, needed only by who imports this file); nothing of rollouts.
Who is to blame is told as for any tool: a result that the server marks as an error, and arguments that it refuses, are
content the model reads; a server that is gone, or breaks the protocol, is a fault of the tool. How long a call may take
is `report_calls`' to say: a call that is given up is cancelled on the server too.

The tools belong to the block and do not pickle. All who use them talk to the same server: what one environment changes
there, the others see. A server that is lost stays lost, since what it knew is lost with it.
"""

import json
import shlex
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskStatus

try:
    import httpx2
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import INVALID_PARAMS, CallToolResult
    from mcp.types import Tool as ListedTool
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"MCP servers as tools need the extra `mcp`, and {error.name!r} is not installed: pip install 'jaxrl[mcp]'",
        name=error.name,
    ) from error

from jaxrl.env import EnvironmentFault
from jaxrl.tools import Tool, ToolError, ToolResult, first_error, read_arguments, tool_table

CLOSE_SECONDS = 10.0
"""How long a server may take to take leave. One that is a process is killed, with its children, well before."""

_HTTP_SECONDS = 30.0  # to connect and to send; how long an answer may take is for the caller to say


@asynccontextmanager
async def mcp_tools(
    *,
    command: Sequence[str] | None = None,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    headers: Mapping[str, str] | None = None,
    prefix: str = "",
    start_seconds: float = 30.0,
) -> AsyncIterator[list[Tool]]:
    """The tools of one server, in its order. Give either `command` or `url`.

    command: starts the server, which talks over its stdin and stdout; its stderr is this process's. env, cwd: of that
    process, which inherits only what names a user and a shell (HOME, PATH, ...); env is added. url: of a server that
    runs already, spoken to by streamable HTTP. headers: sent to it, such as an authorization. prefix: put before each
    name that the model sees, for servers whose tools are named alike. start_seconds: to start and to list the tools.

    Resources: the process and its pipes, or the connection; gone when the block is left, also by an error or a
    cancellation. The block may be entered and left only by one task.
    Errors: ValueError for a server that cannot be meant, or two tools of one name. EnvironmentFault where it does not
    start; in an exception group, like whatever the block itself raises.
    """
    server = _server(command, url, env, cwd, headers)
    if not start_seconds > 0:
        raise ValueError(f"start_seconds={start_seconds}: expected a positive number of seconds")
    connection = _Connection(server)
    async with anyio.create_task_group() as group:
        listed = await _started(partial(group.start, connection.serve), server, start_seconds)
        tools = [McpTool(prefix + each.name, *_shown(each), each.name, connection) for each in listed]
        yield list(tool_table(tools).values())
        connection.leave.set()
        group.cancel_scope.deadline = anyio.current_time() + CLOSE_SECONDS


@dataclass(frozen=True)
class McpTool:
    """One tool of a server. name: as the model sees it. called: as the server knows it."""

    name: str
    description: str
    parameters_schema: Mapping[str, Any]
    called: str
    connection: "_Connection" = field(repr=False)

    async def execute(self, arguments: str) -> ToolResult:
        """What the server answers, as text."""
        result = await self.connection.call(self.called, read_arguments(arguments))
        text = result_text(result)
        return ToolResult(f"Error: {text}" if result.is_error else text, is_error=result.is_error)


def _shown(listed: ListedTool) -> tuple[str, Mapping[str, Any]]:
    return listed.description or listed.title or "", listed.input_schema


def result_text(result: CallToolResult) -> str:
    """The parts of a result, one after another. What is no text is named; structured content only where it is alone."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_PARTS.get(part.type, _named)(part) for part in result.content)


def _named(part: Any) -> str:
    return f"[{part.type}]"


def _named_data(part: Any) -> str:
    return f"[{part.type}: {part.mime_type}]"


def _resource(part: Any) -> str:
    held = part.resource
    return getattr(held, "text", f"[{part.type}: {held.uri}]")


_PARTS: Mapping[str, Callable[[Any], str]] = {
    "text": lambda part: part.text,
    "image": _named_data,
    "audio": _named_data,
    "resource": _resource,
    "resource_link": lambda part: f"[{part.type}: {part.uri}]",
}


# --- the server ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Server:
    """How to reach a server. label: what messages call it, without secrets."""

    label: str
    transport: Callable[[], AbstractAsyncContextManager[Any]]


def _server(
    command: Sequence[str] | None,
    url: str | None,
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    headers: Mapping[str, str] | None,
) -> _Server:
    """Raises ValueError for what does not go together."""
    if (command is None) == (url is None):
        raise ValueError(f"command={command!r}, url={url!r}: give one of them, the command of a server or its address")
    if url is not None:
        if env is not None or cwd is not None:
            raise ValueError("env and cwd are for a server that `command` starts; one at a url has its own")
        return _Server(str(httpx2.URL(url).copy_with(userinfo=b"", query=None)), partial(_http, url, headers))
    if headers is not None:
        raise ValueError("headers are for a server at a url; one that `command` starts takes env")
    if isinstance(command, str) or not command:
        raise ValueError(f"command={command!r}: expected a program and its arguments, such as ['python', 'server.py']")
    program, *arguments = command
    process = StdioServerParameters(command=program, args=arguments, env=dict(env) if env else None, cwd=cwd)
    label = textwrap.shorten(shlex.join(command), 100, placeholder=" ...")
    return _Server(repr(label), partial(stdio_client, process, errlog=sys.stderr))


@asynccontextmanager
async def _http(url: str, headers: Mapping[str, str] | None) -> AsyncIterator[Any]:
    patience = httpx2.Timeout(_HTTP_SECONDS, read=None)
    async with (
        httpx2.AsyncClient(headers=dict(headers or {}), timeout=patience) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


# --- the connection ------------------------------------------------------------------------------


class _Connection:
    """Owns the client of one server, from `serve` to `leave` or until the server is lost."""

    def __init__(self, server: _Server) -> None:
        self.leave = anyio.Event()
        self._server = server
        self._client: Client | None = None
        self._end = "its `mcp_tools` block has been left"

    async def serve(self, *, task_status: TaskStatus[list[ListedTool]]) -> None:
        """Be connected until `leave`; says the tools. The client's own tasks live in here, so deadlines around it nest.

        A connection that is lost later ends no block: it is the fault of the calls that were in flight, and of all
        that follow.
        """
        try:
            async with Client(self._server.transport()) as client:
                listed = await _list_tools(client)
                self._client = client
                task_status.started(listed)
                await self.leave.wait()
        except ExceptionGroup as error:  # of the transport's tasks
            if self._client is None:
                raise
            self._end = repr(first_error(error))
        finally:
            self._client = None

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """What a tool of the server gives. Raises ToolError for what it refuses, EnvironmentFault when it is gone."""
        label = self._server.label
        if self._client is None:
            raise EnvironmentFault(f"MCP server {label} is gone: {self._end}")
        try:
            return await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            raise EnvironmentFault(f"MCP server {label} failed: {error.message}") from error


async def _started(
    start: Callable[[], Awaitable[list[ListedTool]]], server: _Server, seconds: float
) -> list[ListedTool]:
    try:
        with anyio.fail_after(seconds):
            return await start()
    except TimeoutError as error:
        raise EnvironmentFault(f"MCP server {server.label} did not list its tools within {seconds:g} s") from error
    except Exception as error:
        raise EnvironmentFault(f"MCP server {server.label} did not start: {first_error(error)!r}") from error


async def _list_tools(client: Client) -> list[ListedTool]:
    page = await client.list_tools()
    tools = page.tools
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools = [*tools, *page.tools]
    return tools
