"""tokenkeeperd with several databases: which of them has a topic. Needs Python 3.8 or newer, and no library.

Copy this file into your project. With psycopg, and a pool and a time limit for each database, so that one that hangs holds up nobody else:

    topics = TopicMap("/etc/tokenkeeperd/map.json")
    pools = {name: ConnectionPool(address, timeout=2, kwargs={"options": "-c statement_timeout=2s"})
             for name, address in topics.databases.items()}
    with pools[topics.database("com.example.app")].connection() as connection:
        tokenkeeper.register(connection, token, "com.example.app", device_id=installation)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

BUCKETS = 1024


class TopicMap:
    """The map, as in the file that tokenkeeperd's setting map.file names. Read it again when it has changed."""

    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        self.databases: dict[str, str] = content["databases"]
        """Connection strings by name."""
        self._topics: dict[str, str] = content.get("topics", {})
        self._split = set(content.get("split_by_device", []))
        self._owners = {bucket: name for name, text in content["buckets"].items() for bucket in _numbers(text)}
        if len(self._owners) != BUCKETS:
            raise ValueError(f"{path}: {BUCKETS - len(self._owners)} buckets are in no database; run `tokenkeeperd map`")

    def database(self, topic: str, device_id: str | None = None) -> str:
        """The name of the database of a topic. A topic that is split by device needs the device: ValueError otherwise."""
        if topic in self._topics:
            return self._topics[topic]
        if topic not in self._split:
            return self._owners[bucket(topic)]
        if not device_id:
            raise ValueError(f"{topic} is split by device: name the device")
        return self._owners[bucket(topic, str(device_id))]

    def all_databases(self, topic: str) -> list[str]:
        """The databases that have tokens of a topic: several if it is split by device."""
        return sorted(set(self._owners.values())) if topic in self._split else [self.database(topic)]


def bucket(topic: str, device_id: str | None = None) -> int:
    """The bucket of a topic, or of a device of a topic that is split: from SHA-256. Upper case of A to Z counts as lower case in a device."""
    key = topic.encode() + (b"" if device_id is None else b"\n" + device_id.encode().lower())
    return int.from_bytes(hashlib.sha256(key).digest()[:2], "big") % BUCKETS


def _numbers(text: str) -> Iterable[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
