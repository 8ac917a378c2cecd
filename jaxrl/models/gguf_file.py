"""The GGUF container: its metadata, and where in the file each tensor lies.

Reads the header itself, because gguf-py builds several array objects for each of a vocabulary's 150 000 strings
and merges, seconds of work at every start. Knows nothing of architectures. Format versions 2 and 3, little endian:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

try:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize
except ImportError as error:  # an extra: everything but reading .gguf files works without it
    _missing: ImportError | None = error
else:
    _missing = None

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: shape as numpy has it (slowest axis first), quantisation, first byte in the file and length."""

    shape: tuple[int, ...]
    kind: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """What a file says about itself. Its tensors are read by `read_tensor`."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def open_gguf(path: Path) -> GgufFile:
    """Read the header.

    Raises ImportError without the gguf extra, FileNotFoundError, and ValueError for a file that is no GGUF, of an
    unknown version or quantisation, or shorter than its header says.
    """
    if _missing is not None:
        raise ImportError("reading .gguf files needs the gguf package: pip install 'jaxrl[gguf]'") from _missing
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    size = path.stat().st_size
    buffer = np.memmap(path, np.uint8, "r").data if size else memoryview(b"")
    if bytes(buffer[:4]) != b"GGUF":
        raise ValueError(f"{path} ({size} bytes) is not a GGUF file: it starts with {bytes(buffer[:4])!r}")
    try:
        version, tensor_count, key_count = struct.unpack_from("<IQQ", buffer, 4)
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version}; expected 2 or 3, little endian")
        metadata, at = _metadata(buffer, 24, key_count)
        tensors, at = _tensors(buffer, at, tensor_count)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} ({size} bytes) is truncated or damaged ({error}); download it again") from error
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    base = -(-at // alignment) * alignment
    placed = {name: StoredTensor(t.shape, t.kind, base + t.start, t.nbytes) for name, t in tensors.items()}
    end = max((t.start + t.nbytes for t in placed.values()), default=at)
    if end > size:
        raise ValueError(f"{path} is truncated: {size} bytes, its header asks for {end}; download it again")
    return GgufFile(path, metadata, placed)


def read_tensor(file: GgufFile, name: str) -> np.ndarray:
    """One tensor, dequantised to float32. Raises ValueError for a quantisation gguf-py cannot undo."""
    tensor = file.tensors[name]
    raw = np.memmap(file.path, np.uint8, "r", offset=tensor.start, shape=(tensor.nbytes,))
    try:
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return np.asarray(dequantize(rows, GGMLQuantizationType(tensor.kind))).reshape(tensor.shape)
    except NotImplementedError as error:
        kind = GGMLQuantizationType(tensor.kind).name
        raise ValueError(f"{file.path}: {name} is {kind}, which gguf-py cannot read; use another file") from error


def _metadata(buffer: memoryview, at: int, count: int) -> tuple[dict[str, Any], int]:
    values = {}
    for _ in range(count):
        key, at = _string(buffer, at)
        (kind,) = struct.unpack_from("<I", buffer, at)
        values[key], at = _value(buffer, at + 4, kind)
    return values, at


def _value(buffer: memoryview, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(buffer, at)
    if kind == _ARRAY:
        item, length = struct.unpack_from("<IQ", buffer, at)
        return _array(buffer, at + 12, item, length)
    scalar = _scalar(kind)
    return struct.unpack_from(scalar, buffer, at)[0], at + struct.calcsize(scalar)


def _array(buffer: memoryview, at: int, kind: int, length: int) -> tuple[list[Any], int]:
    if kind in _SCALARS:
        scalars = f"<{length}{_SCALARS[kind]}"
        return list(struct.unpack_from(scalars, buffer, at)), at + struct.calcsize(scalars)
    values = []
    for _ in range(length):
        value, at = _value(buffer, at, kind)
        values.append(value)
    return values, at


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise struct.error(f"value of unknown type {kind}")
    return f"<{_SCALARS[kind]}"


def _string(buffer: memoryview, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", buffer, at)
    end = at + 8 + length
    if end > len(buffer):
        raise struct.error(f"a string ends at byte {end}")
    return str(buffer[at + 8 : end], "utf-8"), end


def _tensors(buffer: memoryview, at: int, count: int) -> tuple[dict[str, StoredTensor], int]:
    """Tensors with `start` counted from the beginning of the data."""
    tensors: dict[str, StoredTensor] = {}
    for _ in range(count):
        name, at = _string(buffer, at)
        (rank,) = struct.unpack_from("<I", buffer, at)
        *dims, kind, start = struct.unpack_from(f"<{rank}QIQ", buffer, at + 4)
        at += 4 + 8 * rank + 12
        if name in tensors:
            raise ValueError(f"tensor {name} is in the GGUF file twice; use another file")
        tensors[name] = StoredTensor(tuple(reversed(dims)), kind, start, _nbytes(name, dims, kind))
    return tensors, at


def _nbytes(name: str, dims: list[int], kind: int) -> int:
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"tensor {name} has the unknown quantisation {kind}; update gguf: pip install -U gguf"
        ) from error
    return int(np.prod(dims, dtype=np.int64)) // block * block_bytes
