"""Ten thousand broken headers, indexes and configurations: our own error or a clean read."""

import json
import os
import pathlib
import random
import tempfile

import pytest
from golden import FIXTURES, config_of

from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.quantized import Logical
from moe_flax.checkpoint.reader import INDEX_NAME, Reader
from moe_flax.checkpoint.source import Source

ODD = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, 1.5, float("inf"), "", "x", "../x",
    "/etc/passwd", "F32", "\ud800", [], [1], [0, 8], [[]], {}, {"a": 1}, "model.safetensors",
    "a\0b", ".", "..", "fp8",
]  # fmt: skip


def mutate(value, rng):
    """One random change somewhere in a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        value = dict(value)
        action = rng.random()
        if action < 0.1:
            del value[key]
        elif action < 0.2:
            value[rng.choice(["x", "", key + "x", "__metadata__", "dtype"])] = value.pop(key)
        else:
            value[key] = mutate(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        value = list(value)
        i = rng.randrange(len(value))
        value[i] = mutate(value[i], rng)
        return value
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 4, -8, 1000])
    return rng.choice(ODD)


def scramble(data, rng):
    """Flips, cuts, doubles or drops a few bytes."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(data))
        action = rng.randrange(4)
        if action == 0:
            data[i] = rng.randrange(256)
        elif action == 1:
            del data[i : i + rng.randint(1, 9)]
        elif action == 2:
            data[i:i] = data[i : i + rng.randint(1, 9)]
        else:
            del data[rng.randrange(len(data)) :]
        if not data:
            return b""
    return bytes(data)


def small_file():
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    }
    return header, bytes(range(40))


def packed(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def refusal(file, action):
    """Whether an action raised our error, which must name the file."""
    try:
        action()
    except CheckpointError as error:
        if str(file) not in str(error):
            raise
        return True
    return False


def read_all(directory):
    """Maps every tensor of a directory, each within its file."""
    reader = Reader(directory)
    for name, value in reader.items():
        info = reader.info(name)
        if len(value.tobytes()) != info.stop - info.start or reader.file(name).parent != directory:
            raise AssertionError(name)


@pytest.fixture
def memory():
    """A directory in memory where there is one: thousands of files are written."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=root) as path:
        yield pathlib.Path(path)


def test_headers(memory):
    rng = random.Random(0)
    header, data = small_file()
    file = memory / "model.safetensors"
    refused = 0
    for turn in range(6000):
        whole = packed(header, data)
        file.write_bytes(packed(mutate(header, rng), data) if turn % 2 else scramble(whole, rng))
        refused += refusal(file, lambda: read_all(memory))
    assert refused > 3000
    assert [path.name for path in memory.iterdir()] == ["model.safetensors"]


def test_indexes(memory):
    rng = random.Random(1)
    header, data = small_file()
    directory = memory / "m"
    directory.mkdir()
    (memory / "x").write_bytes(packed(header, data))
    (directory / "s.safetensors").write_bytes(packed(header, data))
    index = {"metadata": {"total_size": 40}, "weight_map": dict.fromkeys("abc", "s.safetensors")}
    refused = 0
    for turn in range(3000):
        text = json.dumps(index).encode()
        broken = json.dumps(mutate(index, rng)).encode() if turn % 2 else scramble(text, rng)
        (directory / INDEX_NAME).write_bytes(broken)
        refused += refusal(directory, lambda: read_all(directory))
    assert refused > 1000
    assert sorted(p.name for p in memory.iterdir()) == ["m", "x"]
    assert sorted(p.name for p in directory.iterdir()) == [INDEX_NAME, "s.safetensors"]


CONFIGS = ["deepseek_v3-plain", "step3p7-plain", "dbrx-plain", "gpt_oss-plain", "nemotron_h-plain"]


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name):
    rng = random.Random(2)
    tensors = dict(Reader(FIXTURES / name))
    group = {"weights": {"strategy": "channel"}}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    quantization["config_groups"] = {"group": group}
    config = config_of(FIXTURES / name) | {"quantization_config": quantization}

    def opened(broken):
        return Source(Logical(tensors, broken, "here"), broken, file="here")

    refused = 0
    for _ in range(300):
        broken = mutate(mutate(config, rng), rng)
        if isinstance(broken, dict):
            refused += refusal("here", lambda b=broken: opened(b))
    assert refused > 30
