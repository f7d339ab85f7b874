"""moe-flax bench: what is timed is the same layer, and what is printed is what was timed."""

import importlib.util
import json
import re
import sys
import types

import jax
import numpy as np
import pytest

from moe_flax import bench, bench_peers, plots
from moe_flax.cli import main

SIZES = bench.Sizes(experts=4, top_k=2, features=16, hidden=24)


@pytest.fixture
def quick(monkeypatch):
    """One call a time, and rates that were not measured."""
    monkeypatch.setattr(bench, "_WINDOW", 0.0)
    monkeypatch.setattr(bench, "measure_rates", lambda *_: bench.Rates(1e12, 1e10))


def distance(actual, wanted) -> float:
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", ["ragged_dot", pytest.param("torch", marks=pytest.mark.parity)])
def test_peers_compute_what_ours_does(name):
    problem = bench.make_problem(SIZES, 20, "float32")
    ours = bench_peers.jax_candidate(lambda *a: bench.our_layer("reference", *a), problem, True)
    wanted, wanted_grads = ours.run()
    actual, grads = bench_peers.make(name, problem, True).run()
    assert 0.1 < np.std(wanted) < 10
    forward = bench_peers.make(name, problem, False).run()
    tensors = [x.detach().numpy() if name == "torch" else x for x in (forward, actual, *grads)]
    by_tokens, by_wi, by_wo, by_weights = wanted_grads
    by_wi = np.swapaxes(by_wi, 1, 2).reshape(4, 16, 48)  # gates, then ups
    others = (wanted, wanted, by_tokens, by_wi, by_wo, by_weights)
    for a, w in zip(tensors, others, strict=True):
        assert distance(a, w) < 1e-5


def test_floor_is_the_larger_of_products_and_bytes():
    sizes = bench.Sizes(experts=8, top_k=2, features=100, hidden=10)
    assert bench.operations(sizes, 50) == 50 * 2 * 3 * (2 * 100 * 10)
    rates = bench.Rates(operations=1e6, bytes=1e9)
    assert rates.floor(sizes, 50, 3, 2, False) == pytest.approx(0.6)
    assert rates.floor(sizes, 50, 3, 2, True) == pytest.approx(1.8)
    moved = (3 * 3 * 100 * 10 + 2 * 50 * 100) * 2  # experts that are hit; tokens in and out
    rates = bench.Rates(operations=1e12, bytes=1e3)
    assert rates.floor(sizes, 50, 3, 2, False) == pytest.approx(moved / 1e3)


def test_candidates_take_turns_and_the_median_counts(monkeypatch):
    monkeypatch.setattr(bench, "_WINDOW", 0.0)
    log = []
    durations = {"a": iter([9, 9, 1, 50, 2]), "b": iter([9, 9, 7, 8, 0])}
    now = [0.0]

    def candidate(name):
        def run():
            log.append(name)
            now[0] += next(durations[name])

        return bench_peers.Candidate(run, lambda _: None)

    monkeypatch.setattr(bench, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    times = bench.interleave({name: candidate(name) for name in "ab"}, 3)
    assert times == {"a": 2, "b": 7}
    assert "".join(log) == "aabb" + "ab" * 3


def test_rates_are_measured():
    rates = bench.measure_rates("float32", 1, True)
    assert 1e8 < rates.bytes < 1e13
    assert 1e8 < rates.operations < 1e15


@pytest.mark.slow
def test_prints_writes_and_draws(quick, tmp_path, capsys):
    command = "bench --shape 4 2 16 24 --tokens 8 --repeats 2 --peers ragged_dot"
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    assert main([*command.split(), *files]) == 0
    text = capsys.readouterr().out
    assert "E=4, K=2, D=16, F=24" in text
    assert "a copy at 10.0 GB/s and a dense float32 product at 1.000 TFLOP/s" in text
    rows = [bench.Time(**row) for row in json.loads((tmp_path / "b.json").read_text())]
    assert [(t.tokens, t.work, t.name) for t in rows] == [
        (8, work, name) for work in ("forward", "training") for name in ("moe_flax", "ragged_dot")
    ]
    for line in bench.table(rows):
        assert line in text
    for t in rows:
        done = bench.operations(SIZES, t.tokens) * (3 if t.work == "training" else 1)
        assert t.tflops == pytest.approx(done / t.ms / 1e9)
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_table_and_picture_show_the_same_times():
    times = [
        bench.Time("moe_flax", "forward", 64, 2.0, 10.0, 0.5),
        bench.Time("torch", "forward", 64, 3.0, 6.0, 0.25),
        bench.Time("moe_flax", "forward", 8, 1.0, 4.0, 0.8),
    ]
    lines = [line.split() for line in bench.table(times)]
    assert lines[1] == ["64", "forward", "moe_flax", "2.000", "10.000", "0.50"]
    assert lines[2] == ["64", "forward", "torch", "3.000", "6.000", "0.25", "1.50"]
    panel = plots.benchmark(times).axes[0]
    assert [bar.get_height() for bar in panel.patches] == [10, 4, 6]
    assert [bar.get_center()[0] for bar in panel.patches] == pytest.approx([0.8, -0.2, 1.2])
    assert [list(line.get_ydata()) for line in panel.lines[:2]] == [[24, 24], [5, 5]]
    assert [text.get_text() for text in panel.get_xticklabels()] == ["8 tokens", "64 tokens"]
    with pytest.raises(ValueError, match="at least one time"):
        plots.benchmark([])


def test_presets_name_their_sizes(quick, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda sizes, tokens, work, **_: [])
    assert main(["bench", "--preset", "qwen3-30b-a3b", "--peers"]) == 0
    assert "E=128, K=8, D=2048, F=768" in capsys.readouterr().out


def test_absent_and_failing_peers_are_lines(quick, monkeypatch, capsys):
    real = importlib.util.find_spec
    absent = ("tokamax", "torch")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in absent else real(name, *a)
    )

    def broken(*_):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(bench_peers, "make", broken)
    command = "bench --shape 4 2 16 24 --tokens 8 --passes forward --repeats 1"
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    assert "tokamax: left out: not installed" in text
    assert "torch: left out: not installed" in text
    assert "ragged_dot, 8 tokens, forward: failed: out of luck\n" in text
    assert "moe_flax" in text


def test_torch_that_cannot_take_part_says_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    old = types.SimpleNamespace(
        __version__="2.5", nn=types.SimpleNamespace(functional=types.SimpleNamespace())
    )
    monkeypatch.setitem(sys.modules, "torch", old)
    assert bench_peers.missing("torch", "gpu") == "torch 2.5 has no grouped_mm; 2.10 and newer have"
    old.nn.functional.grouped_mm = print
    old.cuda = types.SimpleNamespace(is_available=lambda: False)
    assert bench_peers.missing("torch", "gpu") == "torch 2.5 finds no GPU"
    assert bench_peers.missing("torch", "tpu") == "it does not run on tpu"
    assert bench_peers.missing("torch", "cpu") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "one of the arguments --preset --shape is required"),
        ("--preset no-such-model", "no preset 'no-such-model'; known presets: .*qwen3-30b-a3b"),
        ("--preset tiny --shape 4 2 16 24", "not allowed with argument"),
        ("--shape 4 5 16 24", "got K=5 > E=4"),
        ("--shape 4 2 16", "expected 4 arguments"),
        ("--shape 4 2 0 24", "'0' is not a whole number above 0"),
        ("--preset tiny --tokens -1", "'-1' is not a whole number above 0|expected at least one"),
        ("--preset tiny --dtype int8", "invalid choice: 'int8'"),
        ("--preset tiny --peers megablox", "invalid choice: 'megablox'"),
        ("--preset tiny --backend triton", "'triton' cannot run here: it needs an NVIDIA GPU"),
        ("--preset tiny --plot b.docx", r"--plot writes \.png, \.pdf, \.svg, got b\.docx"),
        ("--preset tiny --json no/such/b.json", "there is no directory no/such"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments.split()])
    assert stopped.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "error:" in x]
    assert re.search(message, line), line


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["bench", "--preset", "tiny", "--plot", "b.png"])
    assert "pip install 'moe-flax[plots]'" in capsys.readouterr().err


def test_problems_are_of_order_1_and_choose_different_experts():
    problem = bench.make_problem(SIZES, 50, "bfloat16")
    assert problem.tokens.dtype == problem.wi.dtype == jax.numpy.bfloat16
    assert all(len(set(row)) == 2 for row in np.asarray(problem.ids))
    assert set(np.asarray(problem.ids).ravel()) == set(range(4))
