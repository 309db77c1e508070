"""clients/python/tokenkeeper_shards.py, with the vectors that the tests of Swift and SQL read too."""

import json
import tempfile
import unittest
from pathlib import Path

from tokenkeeper_shards import read_map, shard_of, split

VECTORS = json.loads((Path(__file__).parents[2] / "clients" / "shard-vectors.json").read_text())


class Shards(unittest.TestCase):
    def test_each_vector_has_its_shard(self):
        for vector in VECTORS:
            for shards, expected in vector["shards"].items():
                self.assertEqual(shard_of(vector["token"], int(shards)), expected, vector)

    def test_the_number_is_a_power_of_two(self):
        for shards in (0, 3, -4, 2048):
            with self.assertRaises(ValueError):
                shard_of("aa", shards)

    def test_a_list_is_split_in_order(self):
        self.assertEqual(split(["aa", "zz", "AA", None], 2), {1: ["aa", "AA"], 0: ["zz", None]})

    def test_a_map_has_a_power_of_two_of_shards(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "shards.toml"
            path.write_text('shards = [\n  "host=a dbname=t0",\n  "host=b dbname=t1",\n]\n')
            self.assertEqual(read_map(path), ["host=a dbname=t0", "host=b dbname=t1"])
            path.write_text('shards = ["a=1", "b=2", "c=3"]\n')
            with self.assertRaises(ValueError):
                read_map(path)


if __name__ == "__main__":
    unittest.main()
