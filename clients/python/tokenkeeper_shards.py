"""Which shard of tokenkeeperd has a device token, for senders that go straight to the shards.

Copy this file into your project. It needs no library.

    shards = read_map("/etc/tokenkeeperd/shards.toml")
    for number, tokens in split(tokens, len(shards)).items():
        with psycopg.connect(shards[number]) as connection:
            ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256

_HEX = re.compile(r"(?:[0-9A-Fa-f]{2}){1,512}")


def shard_of(token: str | None, shards: int) -> int:
    """Return the number of the shard that has the token, from 0, as the SQL function tokenkeeper.shard_of does.

    A malformed token and None are on shard 0, where they are rejected. `shards` is a power of two from 1 to 1024.
    """
    if not 1 <= shards <= 1024 or shards & (shards - 1):
        raise ValueError(f"shards is {shards}, expected a power of two from 1 to 1024")
    if token is None or not _HEX.fullmatch(token):
        return 0
    return int.from_bytes(sha256(bytes.fromhex(token)).digest()[:4], "big") & (shards - 1)


def split(tokens: Iterable[str | None], shards: int) -> dict[int, list[str | None]]:
    """Return the tokens of each shard that has some, in their order."""
    parts: dict[int, list[str | None]] = {}
    for token in tokens:
        parts.setdefault(shard_of(token, shards), []).append(token)
    return parts


def read_map(path: str) -> list[str]:
    """Return the connection strings in a shard map, in the order of the shards. Needs Python 3.11."""
    import tomllib

    with open(path, "rb") as file:
        shards = tomllib.load(file)["shards"]
    shard_of(None, len(shards))
    return shards
