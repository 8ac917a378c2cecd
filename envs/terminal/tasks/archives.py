"""Compressed fixtures: the same bytes for the same content, whenever they are made. Knows no task."""

import gzip
from collections.abc import Mapping

from envs.terminal.files import pack
from envs.terminal.sandbox import File


def compress(data: bytes) -> bytes:
    """A gzip file."""
    return gzip.compress(data, mtime=0)


def archive(files: Mapping[str, str]) -> bytes:
    """A tar.gz of text files."""
    return compress(pack({path: File(body.encode()) for path, body in files.items()}))
