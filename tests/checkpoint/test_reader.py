"""Safetensors headers and indexes: read right, and every malformed one refused by name."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from golden import FIXTURES, tensors_of, write
from safetensors.numpy import save_file

from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.reader import DTYPES, INDEX_NAME, Reader, read_header
from moe_flax.checkpoint.writer import array_output, write_checkpoint


def raw(path, header, data=b"", length=None):
    """A file from a header (dict or bytes) and data, as broken as wanted."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    count = len(text) if length is None else length
    path.write_bytes(count.to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_reference_implementation_wrote():
    reader = Reader(FIXTURES / "qwen3_moe-plain")
    expected = tensors_of(FIXTURES / "qwen3_moe-plain")
    assert set(reader) == set(expected)
    assert len(reader) == len(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(reader[name], value)
        assert reader.info(name).shape == value.shape


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"F8_E8M0"}))
def test_reads_every_dtype(tmp_path, dtype):
    value = np.arange(6).astype(DTYPES[dtype]).reshape(2, 3)
    raw(
        tmp_path / "model.safetensors",
        {"x": entry(dtype, (2, 3), (0, value.nbytes))},
        value.tobytes(),
    )
    read = Reader(tmp_path)["x"]
    assert read.dtype == value.dtype
    np.testing.assert_array_equal(read, value)


def test_reads_scales_that_are_powers_of_two(tmp_path):
    raw(tmp_path / "model.safetensors", {"x": entry("F8_E8M0", (2,), (0, 2))}, bytes([127, 130]))
    assert Reader(tmp_path)["x"].astype(np.float32).tolist() == [1.0, 8.0]


def test_views_are_mapped_read_only_and_may_be_unaligned(tmp_path):
    value = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    header = {"odd": entry("U8", (1,), (0, 1)), "x": entry("BF16", (2,), (1, 5))}
    raw(tmp_path / "model.safetensors", header, b"\7" + value.tobytes())
    read = Reader(tmp_path)["x"]
    assert not read.flags.owndata
    assert not read.flags.writeable
    assert read.astype(np.float32).tolist() == [1.5, -2.0]


def test_empty_and_scalar_tensors(tmp_path):
    header = {"none": entry("F32", (0, 4), (0, 0)), "one": entry("F32", (), (0, 4))}
    raw(tmp_path / "model.safetensors", header, np.float32(3).tobytes())
    reader = Reader(tmp_path)
    assert reader["none"].shape == (0, 4)
    assert reader["one"][()] == 3


BROKEN = {
    "truncated before the header": (b"1234567", None),
    "header past the end": ({"x": entry()}, {"length": 1 << 20}),
    "over 100000000": ({"x": entry()}, {"length": 1 << 40}),
    "not valid JSON": (b"{]", None),
    "expected a JSON object": (b"[1]", None),
    "names ['x'] twice": (
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        {"data": b"12"},
    ),
    "exactly dtype, shape and data_offsets": ({"x": {"dtype": "F32"}}, None),
    "unknown dtype 'F5'": ({"x": entry("F5")}, {"data": b"12345678"}),
    "no list of sizes": ({"x": entry(shape=(-2,))}, {"data": b"12345678"}),
    "no pair of positions": ({"x": entry(offsets=(0, 8, 16))}, {"data": b"12345678"}),
    "hold 7 bytes": ({"x": entry(offsets=(0, 7))}, {"data": b"1234567"}),
    "overlaps": ({"x": entry(), "y": entry(offsets=(4, 12))}, {"data": b"x" * 12}),
    "leaves a gap": ({"x": entry(), "y": entry(offsets=(12, 20))}, {"data": b"x" * 20}),
    "data ends at byte": ({"x": entry()}, {"data": b"1234"}),
    "1 bytes past the last tensor": ({"x": entry()}, {"data": b"123456789"}),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_broken_file_is_refused_by_name(tmp_path, problem):
    header, options = BROKEN[problem]
    file = tmp_path / "model.safetensors"
    if problem.startswith("truncated"):
        file.write_bytes(header)
        problem = "truncated"
    else:
        raw(file, header, **(options or {}))
        problem = problem.replace("header past the end", "truncated: header")
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        Reader(tmp_path)
    assert problem in str(error.value)


def test_errors_name_the_tensor(tmp_path):
    file = raw(tmp_path / "a.safetensors", {"layer.w": entry("F5")}, b"12345678")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor 'layer\.w'"):
        read_header(file)


def index(path, weight_map):
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def shard(path, *names):
    save_file({name: np.ones(2, np.float32) for name in names}, path)


def test_missing_shard(tmp_path):
    shard(tmp_path / "a.safetensors", "x")
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json: shard 'b\.safetensors' is missing"):
        Reader(tmp_path)


def test_index_names_what_a_shard_lacks(tmp_path):
    shard(tmp_path / "a.safetensors", "x")
    index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor 'y': the index names it"):
        Reader(tmp_path)


def test_two_shards_hold_one_tensor(tmp_path):
    shard(tmp_path / "a.safetensors", "x", "y")
    shard(tmp_path / "b.safetensors", "y", "z")
    index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor 'y': also in a\.safetens"):
        Reader(tmp_path)


OUTSIDE = ["parent", "absolute", "absolute, inside", "around", "symlink", "not a string", "empty"]


@pytest.mark.parametrize("kind", OUTSIDE)
def test_shards_outside_the_directory_are_refused(tmp_path, kind):
    inside = tmp_path / "model"
    inside.mkdir()
    shard(tmp_path / "x.safetensors", "x")
    names = {
        "parent": "../x.safetensors",
        "absolute": str(tmp_path / "x.safetensors"),
        "absolute, inside": str(inside / "x.safetensors"),
        "around": "../model/x.safetensors",
        "symlink": "link.safetensors",
        "not a string": 3,
        "empty": "",
    }
    shard(inside / "x.safetensors", "x")
    os.symlink(tmp_path / "x.safetensors", inside / "link.safetensors")
    index(inside, {"x": names[kind]})
    with pytest.raises(CheckpointError, match=r"outside|no file name"):
        Reader(inside)


def test_the_hub_cache_may_link_to_its_blobs(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    shard(blobs / "123", "x")
    os.symlink("../../blobs/123", snapshot / "a.safetensors")
    index(snapshot, {"x": "a.safetensors"})
    assert list(Reader(snapshot)) == ["x"]


def test_directory_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json and no"):
        Reader(tmp_path)
    with pytest.raises(CheckpointError, match="is no directory"):
        Reader(tmp_path / "nowhere")


def test_file_that_shrinks_after_it_was_opened(tmp_path):
    write(tmp_path / "m", {"x": np.ones(4096, np.float32)}, {})
    reader = Reader(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 64)
    with pytest.raises(CheckpointError, match="shrunk"):
        reader["x"]


@pytest.mark.parity
def test_torch_files(tmp_path):
    import torch

    whole = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    torch.save(whole, tmp_path / "pytorch_model.bin")
    reader = Reader(tmp_path)
    assert reader["b"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(reader["a"], whole["a"].numpy())
    assert reader.info("a").shape == (2, 3)


@pytest.mark.parity
def test_torch_files_in_shards(tmp_path):
    import torch

    for name in "ab":
        torch.save({name: torch.ones(2)}, tmp_path / f"{name}.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"a": "a.bin", "b": "b.bin"}})
    )
    assert set(Reader(tmp_path)) == {"a", "b"}
    torch.save({"a": torch.ones(2)}, tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match=r"b\.bin: tensor 'a': also in a\.bin"):
        Reader(tmp_path)


@pytest.mark.parity
def test_a_pickle_never_runs(tmp_path):
    import torch

    mark = tmp_path / "ran"
    call = (os.mkdir, (str(mark),))
    evil = type("Evil", (), {"__reduce__": lambda self: call})()
    torch.save({"a": torch.ones(1), "b": evil}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot load it safely"):
        Reader(tmp_path)
    assert not mark.exists()


def odd_torch_files():
    """What a pytorch_model.bin may hold beside plain tensors by name, and what the error says."""
    import torch

    one = torch.ones(2)
    return {
        "a list": ([one], "holds no tensors by name"),
        "nothing": ({}, "holds no tensors by name"),
        "a number": ({"a": one, "epoch": 3}, "tensor 'epoch': is a int, no tensor"),
        "another key": ({"a": one, 7: one}, "tensor '7'"),
        "sparse": ({"a": one.to_sparse()}, "tensor 'a'"),
        "no data": ({"a": torch.ones(2, device="meta")}, "tensor 'a'"),
        "complex": ({"a": one.to(torch.complex128)}, "tensor 'a': has dtype complex128"),
        "quantized": ({"a": torch.quantize_per_tensor(one, 1.0, 0, torch.qint8)}, "tensor 'a'"),
    }


@pytest.mark.parity
@pytest.mark.parametrize(
    "case",
    ["a list", "nothing", "a number", "another key", "sparse", "no data", "complex", "quantized"],
)
def test_odd_torch_files(tmp_path, case):
    import torch

    held, problem = odd_torch_files()[case]
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin: .*{problem}"):
        Reader(tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_torch_tensors_that_share_or_are_turned(tmp_path, archive, nested):
    import torch

    base = torch.arange(12.0).reshape(3, 4)
    held = {
        "whole": base,
        "turned": base.T,
        "column": base[:, 1],
        "trained": torch.nn.Parameter(base.to(torch.bfloat16).T),
    }
    if archive:  # older files have no such dtype
        held["scale"] = torch.tensor([127], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    outer = {"state_dict": held, "epoch": 3} if nested else held
    torch.save(outer, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
    reader = Reader(tmp_path)
    assert set(reader) == set(held)
    for name in ("whole", "turned", "column"):
        np.testing.assert_array_equal(reader[name], held[name].numpy())
    np.testing.assert_array_equal(reader["trained"].astype(np.float32), base.numpy().T)
    assert not archive or reader["scale"].astype(np.float32) == 1
    outputs = [array_output(name, reader[name]) for name in reader]
    write_checkpoint(tmp_path / "m", outputs, {})
    again = Reader(tmp_path / "m")
    for name in held:
        np.testing.assert_array_equal(again[name], reader[name])


@pytest.mark.parity
def test_torch_index_that_names_what_is_not_there(tmp_path):
    import torch

    index = tmp_path / "pytorch_model.bin.index.json"
    torch.save({"a": torch.ones(2)}, tmp_path / "a.bin")
    index.write_text(json.dumps({"weight_map": {"a": "a.bin", "b": "a.bin"}}))
    with pytest.raises(CheckpointError, match=r"a\.bin: tensor 'b': the index names it"):
        Reader(tmp_path)
    for shard in ("../a.bin", "c.bin"):
        index.write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(CheckpointError, match=r"lies outside|is missing"):
            Reader(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"PK not an archive")
    index.write_text(json.dumps({"weight_map": {"a": "a.bin"}}))
    with pytest.raises(CheckpointError, match=r"a\.bin: torch cannot load it safely"):
        Reader(tmp_path)
