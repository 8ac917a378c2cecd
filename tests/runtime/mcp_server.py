"""A Model Context Protocol server for the tests, which run it as a process of its own.

python tests/runtime/mcp_server.py         over stdin and stdout
python tests/runtime/mcp_server.py http    over HTTP on loopback; prints its port
"""

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import Field

server = MCPServer("tests")


@server.tool()
def add(a: int, b: Annotated[int, Field(description="the other", ge=0)] = 2) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def wait(seconds: float, note: str = "") -> str:
    """Wait; write "cancelled" into the file `note` when that is cut short."""
    try:
        await anyio.sleep(seconds)
    except BaseException:
        _write(note, "cancelled")
        raise
    return f"waited {seconds:g}"


def _write(note: str, text: str) -> None:
    if note:
        Path(note).write_text(text)


@server.tool()
def fail() -> str:
    """Fail."""
    raise RuntimeError("out of order")


@server.tool()
def show(what: Literal["parts", "structured", "nothing", "refused"]) -> CallToolResult:
    """Show a result of some form."""
    return RESULTS[what]


@server.tool()
def environment() -> dict[str, str | None]:
    """Say where the server runs."""
    return {"greeting": os.environ.get("GREETING"), "secret": os.environ.get("SECRET"), "cwd": os.getcwd()}


@server.tool()
def die() -> str:
    """End the server's process."""
    os._exit(3)


RESULTS = {
    "parts": CallToolResult(
        content=[
            TextContent(text="first"),
            ImageContent(data="AAAA", mime_type="image/png"),
            AudioContent(data="AAAA", mime_type="audio/wav"),
            EmbeddedResource(resource=TextResourceContents(uri="file:///a.txt", text="in a")),
            EmbeddedResource(resource=BlobResourceContents(uri="file:///b.bin", blob="AAAA")),
            ResourceLink(uri="file:///c", name="c"),
            TextContent(text="last\n"),
        ],
        structured_content={"not": "said twice"},
    ),
    "structured": CallToolResult(content=[], structured_content={"é": [1]}),
    "nothing": CallToolResult(content=[]),
    "refused": CallToolResult(content=[TextContent(text="not today")], is_error=True),
}


def main() -> None:
    """Serve until stdin ends, or for ever."""
    logging.disable()  # what fails here fails on purpose
    if sys.argv[1:] != ["http"]:
        return server.run()
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    return uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical")).run(sockets=[listener])


if __name__ == "__main__":
    main()
