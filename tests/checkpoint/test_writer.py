"""Checkpoints are written whole or not at all, and continued where a run was cut off."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from golden import tensors_of

from moe_flax.checkpoint.building import incomplete
from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.writer import Output, array_output, write_checkpoint


def outputs(count=6, size=100):
    rng = np.random.default_rng(0)
    return [array_output(f"t{i}", rng.normal(size=size).astype(np.float32)) for i in range(count)]


def failing(error):
    def chunks():
        yield np.zeros(50, np.float32)
        raise error

    return Output("bad", np.dtype(np.float32), (100,), chunks)


def test_the_reference_implementation_reads_it(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5], ml_dtypes.bfloat16),
        "c": np.zeros((0, 3), np.int64),
        "d": np.array(3, np.int32),
    }
    write_checkpoint(tmp_path / "m", [array_output(k, v) for k, v in arrays.items()], {"x": b"1"})
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["model.safetensors", "x"]
    read = tensors_of(tmp_path / "m")
    for name, value in arrays.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)


def test_shards_and_index(tmp_path):
    write_checkpoint(tmp_path / "m", outputs(), {}, shard_bytes=1000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 400
    assert index["weight_map"]["t0"] == "model-00001-of-00003.safetensors"
    assert (
        set(index["weight_map"]) == set(tensors_of(tmp_path / "m")) == {f"t{i}" for i in range(6)}
    )


def test_one_tensor_may_pass_the_limit(tmp_path):
    write_checkpoint(tmp_path / "m", outputs(3), {}, shard_bytes=10)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 3


def test_a_name_is_written_once(tmp_path):
    with pytest.raises(CheckpointError, match="tensor 't0': would be written twice"):
        write_checkpoint(tmp_path / "m", [*outputs(2), *outputs(1)], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "full", "link"])
def test_the_target_is_never_overwritten(tmp_path, kind):
    target = tmp_path / "m"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        target.symlink_to(tmp_path)
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="choose another path"):
        write_checkpoint(target, outputs(), {})
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", outputs(), {})


@pytest.mark.parametrize("fingerprint", ["", "same"])
def test_an_error_leaves_nothing_behind(tmp_path, fingerprint):
    for error in (ValueError("no"), MemoryError()):
        with pytest.raises(type(error)):
            write_checkpoint(
                tmp_path / "m",
                [*outputs(), failing(error)],
                {},
                shard_bytes=900,
                fingerprint=fingerprint,
            )
        assert not list(tmp_path.iterdir())


def test_data_that_is_not_as_planned(tmp_path):
    short = Output("x", np.dtype(np.float32), (4,), lambda: [np.zeros(3, np.float32)])
    with pytest.raises(CheckpointError, match="tensor 'x': wrote 12 of 16 bytes"):
        write_checkpoint(tmp_path / "m", [short], {})
    cast = Output("x", np.dtype(np.float32), (4,), lambda: [np.zeros(4, np.float16)])
    with pytest.raises(CheckpointError, match="got float16, planned float32"):
        write_checkpoint(tmp_path / "m", [cast], {})
    with pytest.raises(CheckpointError, match="complex128 has no safetensors name"):
        write_checkpoint(tmp_path / "m", [array_output("x", np.zeros(1, np.complex128))], {})
    assert not list(tmp_path.iterdir())


def test_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors\.partial: cannot be written"
        ):
            write_checkpoint(tmp_path / "m", outputs(2, 4000), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


KILLED = """
    import os, signal, sys
    sys.path[:0] = {path!r}
    from test_writer import outputs
    from moe_flax.checkpoint.writer import write_checkpoint
    written = 0
    def progress(count):
        global written
        written += count
        if written >= {after}:
            os.kill(os.getpid(), signal.SIGKILL)
    write_checkpoint({target!r}, outputs(), {{"config.json": b"1"}}, shard_bytes=900,
                     fingerprint="f", progress=progress)
"""


def test_killed_runs_are_continued_and_end_the_same(tmp_path):
    write_checkpoint(tmp_path / "whole", outputs(), {"config.json": b"1"}, shard_bytes=900)
    target = tmp_path / "m"
    path = [os.path.dirname(__file__), *filter(None, sys.path)]
    for after in (400, 1200):
        code = KILLED.format(path=path, target=str(target), after=after)
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
        assert run.returncode == -signal.SIGKILL
        assert not target.exists()
    before = {p.name: p.stat().st_mtime_ns for p in incomplete(target).glob("*.safetensors")}
    assert before
    calls = []
    write_checkpoint(
        target,
        [
            Output(o.name, o.dtype, o.shape, lambda o=o: calls.append(o.name) or o.chunks())
            for o in outputs()
        ],
        {"config.json": b"1"},
        shard_bytes=900,
        fingerprint="f",
    )
    assert 0 < len(calls) < 6
    assert not incomplete(target).exists()
    names = sorted(p.name for p in target.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "whole").iterdir())
    for name in names:
        assert (target / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert name not in before or (target / name).stat().st_mtime_ns == before[name]


def test_what_another_run_left_is_not_continued(tmp_path):
    left = incomplete(tmp_path / "m")
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(
            tmp_path / "m",
            [*outputs(), failing(KeyboardInterrupt())],
            {},
            shard_bytes=900,
            fingerprint="a",
        )
    assert list(left.glob("*.safetensors"))
    changed = [array_output(o.name, np.zeros(o.shape, o.dtype)) for o in outputs()]
    changed.append(array_output("bad", np.zeros(100, np.float32)))
    write_checkpoint(tmp_path / "m", changed, {}, shard_bytes=900, fingerprint="b")
    assert all(not value.any() for value in tensors_of(tmp_path / "m").values())
