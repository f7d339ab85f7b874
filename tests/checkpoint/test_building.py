"""Where a checkpoint is built: nothing of others is deleted or written through, every cut heals."""

import pathlib

import pytest
from golden import FIXTURES

from moe_flax.checkpoint import building
from moe_flax.checkpoint.building import MARK_NAME, Building, incomplete
from moe_flax.cli import main

MIXTRAL = str(FIXTURES / "mixtral-plain")
TO = pytest.mark.parametrize("to", ["safetensors", "orbax"])


def convert(target, to, source=MIXTRAL):
    return main(["convert", str(source), str(target), "--to", to])


def content(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@TO
def test_a_directory_of_others_is_refused_and_stays(tmp_path, capsys, to):
    theirs = tmp_path / "m.incomplete"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    assert convert(tmp_path / "m", to) == 1
    error = capsys.readouterr().err
    assert str(theirs) in error
    assert "no unfinished checkpoint" in error
    assert content(tmp_path) == {"m.incomplete/thesis.txt": b"years of work"}


@TO
def test_a_link_in_the_way_is_refused_and_not_followed(tmp_path, capsys, to):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / MARK_NAME).write_text("a plan")
    (tmp_path / "m.incomplete").symlink_to(elsewhere)
    assert convert(tmp_path / "m", to) == 1
    assert "m.incomplete: is in the way and no directory" in capsys.readouterr().err
    assert content(elsewhere) == {MARK_NAME: b"a plan"}


def test_a_link_in_an_unfinished_directory_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    build = Building(tmp_path / "m", "plan")
    assert build.begin()
    (build.directory / "x.partial").symlink_to(victim)
    building.replace_bytes(build.directory / "x", b"new")
    assert victim.read_text() == "untouched"
    assert (build.directory / "x").read_bytes() == b"new"


@TO
@pytest.mark.parametrize("target", [".", "out", "a/../out"])
def test_a_target_in_the_source_is_refused(tmp_path, capsys, to, target):
    source = tmp_path / "source"
    source.mkdir()
    for file in pathlib.Path(MIXTRAL).iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "a").mkdir()
    before = content(tmp_path)
    assert convert(source / target, to, source) == 1
    error = capsys.readouterr().err
    assert str(source) in error
    assert "choose another path" in error
    assert content(tmp_path) == before


@TO
def test_a_file_in_the_way(tmp_path, capsys, to):
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "m"):
        assert convert(target, to) == 1
        assert f"{tmp_path}/file" in capsys.readouterr().err
    assert content(tmp_path) == {"file": b"mine"}


@TO
def test_a_cut_while_finishing_heals(tmp_path, monkeypatch, to):
    """At every call that changes names: a run cut there leaves nothing under the final one."""
    assert convert(tmp_path / "whole", to) == 0
    target = tmp_path / "m"
    for stage in ("whole", "renamed", "without its mark"):
        with monkeypatch.context() as patch:
            patch.setattr(building.Building, "finish", cut_at(stage))
            with pytest.raises(KeyboardInterrupt):
                convert(target, to)
        assert not target.exists()
        assert convert(target, to) == 0
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "whole"]
        skipped = ("_CHECKPOINT_METADATA", "commit_success.txt")  # the time of saving is in them
        same = [
            {k: v for k, v in content(path).items() if not k.endswith(skipped)}
            for path in (target, tmp_path / "whole")
        ]
        assert same[0] == same[1]
        building.shutil.rmtree(target)


def cut_at(stage):
    """`Building.finish` that is cut off."""

    def finish(self):
        if stage != "whole":
            self.directory.rename(self._complete)
        if stage == "without its mark":
            (self._complete / MARK_NAME).unlink()
        raise KeyboardInterrupt

    return finish


def test_without_continuing_what_is_complete_is_made_anew(tmp_path):
    first = Building(tmp_path / "m", "plan")
    first.begin()
    first.directory.rename(first._complete)
    assert not Building(tmp_path / "m", "plan").begin()
    assert Building(tmp_path / "m", "plan", continued=False).begin()
    assert [p.name for p in tmp_path.iterdir()] == [incomplete(tmp_path / "m").name]
