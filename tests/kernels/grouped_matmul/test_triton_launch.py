"""The corrections of jax-triton: for one kernel, in the release that needs them."""

import importlib.metadata
import sys
import types

import pytest

from moe_flax.kernels.grouped_matmul.triton import launch


@pytest.fixture
def jax_triton(monkeypatch):
    """A stand-in for jax-triton 0.4.1: what it launches is returned instead."""
    library = types.SimpleNamespace(TritonKernel=lambda *arguments: arguments, other="other")
    module = types.SimpleNamespace(
        triton_kernel_call_lib=library,
        library=library,
        compile_ttir_to_ptx_inplace=lambda *arguments: arguments,
    )
    package = types.SimpleNamespace(triton_lib=module, version="0.4.1")
    monkeypatch.setitem(sys.modules, "jax_triton", package)
    monkeypatch.setitem(sys.modules, "jax_triton.triton_lib", module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: package.version)
    launch._corrected_jax_triton.cache_clear()
    yield package
    launch._corrected_jax_triton.cache_clear()


def test_only_gluon_kernels_of_ours_are_corrected(jax_triton):
    assert launch.Chip(90, 132).wgmma
    library = jax_triton.triton_lib.triton_kernel_call_lib
    assert library.other == "other"
    ptx = ".visible .entry kernel()\n.reqntid 384\n"
    made = library.TritonKernel(launch.GLUON[0], 4, 1, 1000, ptx, "ttir", 90)
    assert made == (launch.GLUON[0], 12, 1, 1000, ptx, "ttir", 90)
    made = library.TritonKernel("users_kernel", 4, 1, 1000, ptx, "ttir", 90)
    assert made == ("users_kernel", 4, 1, 1000, ptx, "ttir", 90)


def test_only_they_go_through_the_passes_for_gluon(jax_triton):
    assert launch.Chip(90, 132).wgmma
    compile_module = jax_triton.triton_lib.compile_ttir_to_ptx_inplace
    backend = types.SimpleNamespace(
        gluon_to_ttgir=lambda *a: ("gluon", *a), make_ttir=None, make_llir="llir"
    )
    theirs = types.SimpleNamespace(get_entry_func_name=lambda: "users_kernel")
    assert compile_module(theirs, backend, "options", 90) == (theirs, backend, "options", 90)
    ours = types.SimpleNamespace(get_entry_func_name=lambda: launch.GLUON[1])
    module, given, *rest = compile_module(ours, backend, "options", 90)
    assert (module, rest, given.make_llir) == (ours, ["options", 90], "llir")
    assert given.make_ttir(ours, {}, "options", 90) is ours
    assert given.make_ttgir(ours, {}, "options", 90) == ("gluon", ours, {}, "options", 90)


def test_other_chips_touch_nothing(jax_triton):
    assert not launch.Chip(80, 108).wgmma
    assert not launch.Chip(100, 148).wgmma
    assert jax_triton.triton_lib.triton_kernel_call_lib is jax_triton.triton_lib.library


@pytest.mark.parametrize("version", ["0.4.0", "0.4.2", "0.5.0"])
def test_other_releases_are_left_alone_and_go_without(jax_triton, version):
    jax_triton.version = version
    assert not launch.Chip(90, 132).wgmma
    assert jax_triton.triton_lib.triton_kernel_call_lib is jax_triton.triton_lib.library


def test_without_a_gpu_plugin_there_is_nothing_to_correct(jax_triton):
    jax_triton.triton_lib.triton_kernel_call_lib = None
    assert not launch.Chip(90, 132).wgmma


@pytest.mark.parametrize("name", launch.GLUON)
def test_the_names_are_the_kernels(request, name):
    triton = request.path.parents[3] / "moe_flax/kernels/grouped_matmul/triton"
    sources = [path.read_text() for path in triton.glob("*.py")]
    assert any(f"@gluon.jit\ndef {name}(" in source for source in sources)
