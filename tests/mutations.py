"""Random changes to files that parsers read: to their bytes, and to what they say."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import struct
import zipfile
from random import Random
from typing import Any

import numpy as np

from fedcontext.files.tensor_file import PLACE, ZEROS

HUGE = "9" * 5_000  # digits; Python refuses to convert more than 4,300
TOKENS = [
    *(b"0", b"-1", b"0.9", b"1e400", b"-1e400", b"nan", b"NaN", b"inf", b"Infinity", b"null", b"true", b"[]", b"{}"),
    *(b'""', b'"', b"\\", b"\\ud800", b",", b":", b"=", b"[", b"]", b"{", b"}", b"(", b")", b"\n", b"\0", b"\xff"),
    *(b"9223372036854775808", b"18446744073709551616", b"1" * 400, HUGE.encode(), b"[" * 100_000, b'{"a":' * 20_000),
    *(b"\x00" * 64, b"\xff" * 8, b"x" * 5_000, "é😀".encode(), b"'''", b"#", b"..", b"\x93NUMPY", b"PK\x05\x06"),
]
VALUES: list[Any] = [
    *(None, True, 0, -1, 0.9, 1e300, float("nan"), float("inf"), 2**63, 10**400, "", "x", "x" * 5_000, "\ud800", "NaN"),
    *([], {}, [[]], [1, [2]], [0.5] * 6, {"a": {"a": {}}}, [None], ["x"], "9" * 400, "\0", [[1] * 3] * 4, -0.0, 1e-320),
]


def mutate_bytes(random: Random, content: bytes) -> bytes:
    """Return ``content`` with one to four random changes."""
    for _ in range(random.choice((1, 1, 2, 4))):
        content = _changed(random, content)
    return content


def _changed(random: Random, content: bytes) -> bytes:
    start = random.randint(0, len(content))
    stop = min(len(content), start + random.choice((1, 1, 2, 4, 16, 256)))
    kind = random.randrange(7)
    if kind == 0:  # flip bits
        return (
            content[:start] + bytes(byte ^ (1 << random.randrange(8)) for byte in content[start:stop]) + content[stop:]
        )
    if kind == 1:  # delete
        return content[:start] + content[stop:]
    if kind == 2:  # repeat
        return content[:stop] + content[start:stop] * random.choice((1, 2, 50)) + content[stop:]
    if kind == 3:  # truncate
        return content[:start]
    if kind == 4:  # overwrite
        return content[:start] + random.randbytes(stop - start) + content[stop:]
    if kind == 5:  # move
        return content[stop:] + content[start:stop]
    token = random.choice(TOKENS)
    return content[:start] + token + content[random.choice((start, stop)) :]


def mutate_value(random: Random, value: Any) -> Any:
    """Return a JSON value with one to three nodes replaced, removed, repeated or renamed."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 2))):
        value = _changed_node(random, value)
    return value


def _changed_node(random: Random, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or random.random() < 0.1:
        return copy.deepcopy(random.choice(VALUES))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = random.choice(keys)
    kind = random.randrange(8)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, list):
        value.insert(key, value[key])
    elif kind == 1:
        value[random.choice(("", "x" * 5_000, "\ud800", "0", HUGE, *map(str, keys)))] = value.pop(key)
    else:
        value[key] = _changed_node(random, value[key])
    return value


def to_json(value: Any) -> bytes:
    """Return JSON, also of what has no JSON: NaN and lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", errors="surrogatepass")


def mutate_json(random: Random, content: bytes) -> bytes:
    """Return JSON with changed nodes, or with changed bytes."""
    return (
        to_json(mutate_value(random, json.loads(content))) if random.random() < 0.6 else mutate_bytes(random, content)
    )


def mutate_lines(random: Random, content: bytes) -> bytes:
    """Return JSON lines with one line mutated, removed or moved, or with changed bytes."""
    lines = content.splitlines()
    place = random.randrange(len(lines))
    kind = random.randrange(4)
    if kind == 0:
        return mutate_bytes(random, content)
    if kind == 1:
        lines.insert(random.randrange(len(lines)), lines.pop(place))
    else:
        lines[place] = mutate_json(random, lines[place])
    return b"\n".join(lines) + b"\n"


def npy(array: np.ndarray) -> bytes:
    """Return the content of an .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def mutate_npy(random: Random, content: bytes) -> bytes:
    """Return an .npy file with a changed header of the right length, or with changed bytes."""
    (length,) = struct.unpack("<H", content[8:10])
    if random.random() < 0.3:
        return mutate_bytes(random, content)
    header = mutate_bytes(random, content[10 : 10 + length])[:65_535]
    return content[:8] + struct.pack("<H", len(header)) + header + content[10 + length :]


def npz(members: dict[str, bytes]) -> bytes:
    """Return an archive of members, with their checksums."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def mutate_npz(random: Random, content: bytes) -> bytes:
    """Return an archive with one changed array, or with changed bytes."""
    if random.random() < 0.4:
        return mutate_bytes(random, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    chosen = random.choice(list(members))
    return npz({**members, chosen: mutate_npy(random, members[chosen])})


def safetensors(header: bytes, data: bytes) -> bytes:
    """Return a file of the length of a header, the header and data."""
    return struct.pack("<Q", len(header)) + header + data


def mutate_safetensors(random: Random, content: bytes) -> bytes:
    """Return a file with a changed header of the right length, or with changed bytes."""
    (length,) = struct.unpack("<Q", content[:8])
    if random.random() < 0.3:
        return mutate_bytes(random, content)
    return safetensors(mutate_json(random, content[8 : 8 + length]), content[8 + length :])


def mutate_checkpoint(random: Random, content: bytes) -> bytes:
    """Return a checkpoint with changed metadata and the right checksum, or with changed bytes."""
    (length,) = struct.unpack("<Q", content[:8])
    if random.random() < 0.2:
        return mutate_bytes(random, content)
    header = json.loads(content[8 : 8 + length])
    if random.random() < 0.8:
        text = header["__metadata__"]["fedcontext"].encode()
        header["__metadata__"]["fedcontext"] = mutate_json(random, text).decode(errors="replace")
    else:
        start, *names = header
        header = {start: header[start], **{name: mutate_value(random, header[name]) for name in names}}
    return with_checksum(safetensors(json.dumps(header).encode(), content[8 + length :]))


def with_checksum(content: bytes) -> bytes:
    """Return a file of `write_tensors` with the checksum that its other bytes should have."""
    blank = content[:PLACE] + ZEROS.encode() + content[PLACE + len(ZEROS) :]
    return content[:PLACE] + hashlib.sha256(blank).hexdigest().encode() + content[PLACE + len(ZEROS) :]
