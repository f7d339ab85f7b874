"""Orbax checkpoints written an expert at a time: what plain Orbax reads, what a cut leaves."""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from golden import FIXTURES, fixture, tensors_of, write
from jax.sharding import NamedSharding, PartitionSpec

from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.mapping import ArrayParameter, read
from moe_flax.checkpoint.orbax import from_orbax, write_orbax
from moe_flax.checkpoint.source import open_source
from moe_flax.checkpoint.streamed import Streamed, restored_tree, save_tree

SOURCE = FIXTURES / "mixtral-plain"
ROUTER = np.arange(12, dtype=np.float32).reshape(3, 4)
EXPERTS = np.random.default_rng(0).normal(size=(4, 2, 3, 5)).astype(ml_dtypes.bfloat16)


class Spy(ArrayParameter):
    """A parameter that notes what is asked of it, and fails at one row."""

    def __init__(self, array, fails_at=None):
        super().__init__(array)
        self.asked, self.fails_at = [], fails_at

    def read_into(self, out, index):
        if index[0].start == self.fails_at:
            raise OSError("unreadable")
        self.asked.append(out.shape)
        super().read_into(out, index)


def tree(experts, progress=lambda n: None):
    router = Streamed(ArrayParameter(ROUTER), np.dtype(np.float32), by_row=False)
    return {
        "experts.wi": Streamed(experts, EXPERTS.dtype, by_row=True, progress=progress),
        "router.kernel": router,
    }


def test_plain_orbax_restores_it(tmp_path):
    written = []
    save_tree(tmp_path / "layer", tree(ArrayParameter(EXPERTS), written.append))
    assert written == [EXPERTS[0].nbytes] * 4
    for checkpointer in (ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer()):
        with checkpointer:
            found = checkpointer.restore(tmp_path / "layer")
        assert set(found) == {"experts.wi", "router.kernel"}
        for name, value in (("experts.wi", EXPERTS), ("router.kernel", ROUTER)):
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)


def test_plain_orbax_restores_it_onto_a_mesh(tmp_path):
    save_tree(tmp_path / "layer", tree(ArrayParameter(EXPERTS)))
    mesh = jax.make_mesh((2,), ("expert",))
    abstract = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))
        for name, value, spec in (
            ("experts.wi", EXPERTS, PartitionSpec("expert")),
            ("router.kernel", ROUTER, PartitionSpec()),
        )
    }
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "layer", abstract)
    for name, value in (("experts.wi", EXPERTS), ("router.kernel", ROUTER)):
        np.testing.assert_array_equal(np.asarray(found[name]), value)
        assert found[name].sharding == abstract[name].sharding


def test_experts_are_read_one_at_a_time_and_lie_apart(tmp_path):
    spy = Spy(EXPERTS)
    save_tree(tmp_path / "layer", tree(spy))
    assert spy.asked == [(1, 2, 3, 5)] * 4
    found = restored_tree(tmp_path / "layer")["experts.wi"]
    chunk = next((tmp_path / "layer" / "experts.wi").glob("2.*"))
    assert chunk.read_bytes() == EXPERTS[2].tobytes()
    for other in (tmp_path / "layer" / "experts.wi").glob("[013].*"):
        other.unlink()  # so reading expert 2 needs no other file
    index = (slice(2, 3), slice(1, 2), slice(0, 3), slice(1, 4))
    np.testing.assert_array_equal(read(found, index), EXPERTS[index])


def test_an_error_leaves_nothing_that_looks_finished(tmp_path):
    with pytest.raises(OSError, match="unreadable"):
        save_tree(tmp_path / "layer", tree(Spy(EXPERTS, fails_at=2)))
    assert not (tmp_path / "layer").exists()


def test_a_full_disk(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
        with pytest.raises(CheckpointError, match=r"experts.w[io]: cannot be written"):
            write_orbax(tmp_path / "out", open_source(SOURCE), fingerprint="one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def files_of(path):
    """Contents by name; Orbax writes the time of saving into one of its files."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name not in ("_CHECKPOINT_METADATA", "commit_success.txt")
    }


class Interrupt(BaseException):
    """As an interrupt from the keyboard: no error, so what is there may be continued."""


@pytest.mark.parametrize("after", [3000, pytest.param(20000, marks=pytest.mark.slow)])
def test_interrupted_conversion_is_continued(tmp_path, after):
    written = [0]

    def interrupting(n):
        written[0] += n
        if written[0] > after:
            raise Interrupt

    source, out = open_source(SOURCE), tmp_path / "out"
    with pytest.raises(Interrupt):
        write_orbax(out, source, fingerprint="one", progress=interrupting)
    assert [p.name for p in tmp_path.iterdir()] == ["out.incomplete"]
    write_orbax(out, source, fingerprint="one")
    write_orbax(tmp_path / "whole", source, fingerprint="one")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_killed_conversion_is_continued(tmp_path):
    arguments = ["convert", str(SOURCE), str(tmp_path / "out"), "--to", "orbax"]
    code = (
        "import os, sys, tqdm, moe_flax.cli as cli\n"
        "update, written = tqdm.tqdm.update, [0]\n"
        "def killing(self, n=1):\n"
        "    written[0] += n\n"
        "    if written[0] > 20000: os.kill(os.getpid(), 9)\n"
        "    return update(self, n)\n"
        "tqdm.tqdm.update = killing\n"
        "cli.main(sys.argv[1:])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, env=environment, check=False, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["out.incomplete"]
    again = [sys.executable, "-m", "moe_flax.cli", *arguments]
    subprocess.run(again, env=environment, check=True, capture_output=True)
    write_orbax(tmp_path / "whole", open_source(SOURCE), fingerprint="one")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    from_orbax(tmp_path / "out", tmp_path / "back")
    wanted, found = tensors_of(SOURCE), tensors_of(tmp_path / "back")
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """mixtral-plain in Orbax."""
    path = tmp_path_factory.mktemp("orbax") / "o"
    write_orbax(path, open_source(SOURCE), fingerprint="one")
    return path


def copied(converted, tmp_path):
    return pathlib.Path(shutil.copytree(converted, tmp_path / "o"))


def test_values_that_are_zero_have_files_too(tmp_path):
    """So that a file that is missing is known as such."""
    zeros = Streamed(ArrayParameter(np.zeros_like(EXPERTS)), EXPERTS.dtype, by_row=True)
    save_tree(tmp_path / "layer", {"experts.wi": zeros})
    assert len(list((tmp_path / "layer" / "experts.wi").glob("?.0*"))) == 4
    assert not read(restored_tree(tmp_path / "layer")["experts.wi"]).any()


@pytest.mark.parametrize("part", ["experts.wi/5.0.0.0", "router.kernel/0.0"])
def test_a_missing_chunk_is_named_and_not_zero(converted, tmp_path, part):
    path = copied(converted, tmp_path)
    layer, name = path / "layers" / "00001", part.split("/")[0]
    (layer / part).unlink()
    with pytest.raises(CheckpointError, match=rf"{layer}/{name}: tensor '{name}': .*{part}") as e:
        from_orbax(path, tmp_path / "back")
    assert "cannot be read" in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


def cut_chunk(path):
    file = path / "layers" / "00000" / "experts.wo" / "3.0.0"
    file.write_bytes(file.read_bytes()[:-1])


def other_array(path):
    layers = path / "layers"
    shutil.rmtree(layers / "00000" / "experts.wo")
    shutil.copytree(layers / "00000" / "experts.wi", layers / "00000" / "experts.wo")


def edited(edit):
    def change(path):
        meta = json.loads((path / "moe_flax.json").read_text())
        edit(meta)
        (path / "moe_flax.json").write_text(json.dumps(meta))

    return change


@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        (lambda path: shutil.rmtree(path / "layers"), "layers/00000"),
        (lambda path: shutil.rmtree(path / "layers" / "00001"), "layers/00001"),
        (lambda path: shutil.rmtree(path / "layers" / "00001" / "experts.wi"), "layers/00001"),
        (lambda path: (path / "layers" / "00001" / "_METADATA").unlink(), "layers/00001"),
        (lambda path: (path / "layers" / "00001" / "_METADATA").write_text("{"), "layers/00001"),
        (lambda path: (path / "layers/00001/experts.wi/.zarray").write_text("{"), "layers/00001"),
        (cut_chunk, "experts.wo"),
        (other_array, "experts.wo"),
        (lambda path: shutil.rmtree(path / "rest"), "rest"),
        (lambda path: (path / "moe_flax.json").unlink(), "moe_flax.json"),
        (lambda path: (path / "moe_flax.json").write_text("[]"), "moe_flax.json"),
        (edited(lambda meta: meta.pop("hf_config")), "moe_flax.json"),
        (edited(lambda meta: meta.update(hf_config=3)), "moe_flax.json"),
        (edited(lambda meta: meta.update(layers=["0"])), "moe_flax.json"),
        (edited(lambda meta: meta["layers"].update(x=meta["layers"]["0"])), "moe_flax.json"),
        (edited(lambda meta: meta["layers"]["0"].pop("prefix")), "moe_flax.json"),
        (edited(lambda meta: meta["layers"]["0"].update(config={})), "moe_flax.json"),
        (edited(lambda meta: meta["layers"]["0"].update(form="x")), "moe_flax.json"),
    ],
)
def test_a_broken_directory(converted, tmp_path, breaks, named):
    path = copied(converted, tmp_path)
    breaks(path)
    with pytest.raises(CheckpointError, match=named):
        from_orbax(path, tmp_path / "back")
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


def test_what_is_no_such_directory(tmp_path):
    for path in (tmp_path, tmp_path / "absent", SOURCE):
        with pytest.raises(CheckpointError, match=str(path)):
            from_orbax(path, tmp_path / "back")


def test_prefixes_there_and_back(tmp_path):
    """Layers under model.language_model. go back there."""
    tensors, config = fixture("qwen3_moe-plain")
    moved = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    source = write(tmp_path / "source", moved, config)
    write_orbax(tmp_path / "o", open_source(source), fingerprint="one")
    from_orbax(tmp_path / "o", tmp_path / "back")
    assert set(tensors_of(tmp_path / "back")) == set(moved)
    from_orbax(tmp_path / "o", tmp_path / "fused", form="fused")
    names = {n for n in tensors_of(tmp_path / "fused") if "experts" in n}
    assert all(name.startswith("model.language_model.layers.") for name in names)
