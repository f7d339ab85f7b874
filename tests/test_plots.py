"""moe_flax.plots: what is drawn is what was given."""

import builtins

import numpy as np
import pytest

from moe_flax import plots


def make_load(steps=6, layers=2, experts=4):
    load = np.full((steps, layers, experts), 8)
    load[0, 1] = [32, 0, 0, 0]
    return load


def test_relative_load_is_one_where_even():
    relative = plots.relative_load(make_load())
    assert relative.shape == (2, 6, 4)
    np.testing.assert_array_equal(relative[0], 1)
    np.testing.assert_array_equal(relative[1, 0], [4, 0, 0, 0])


def test_relative_load_of_unused_layer_is_even():
    np.testing.assert_array_equal(plots.relative_load(np.zeros((1, 1, 3))), 1)


def test_heatmap_has_a_panel_a_layer_and_writes(tmp_path):
    load = make_load()
    figure = plots.load_heatmap(load, marks={2: "bias on"}, steps=range(10, 16))
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 2
    for panel, expected in zip(panels, plots.relative_load(load), strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), expected.T)
        assert tuple(panel.images[0].get_extent()) == (9.5, 15.5, 3.5, -0.5)
        assert [line.get_xdata()[0] for line in panel.lines] == [2]
    assert "bias on" in [text.get_text().strip() for text in panels[0].texts]
    figure.savefig(tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"


def test_heatmap_of_one_step():
    figure = plots.load_heatmap(make_load(steps=1))
    assert tuple(figure.axes[0].images[0].get_extent()[:2]) == (-0.5, 0.5)


def test_curves_and_points_carry_their_data(tmp_path):
    losses = np.linspace(5, 2, 100)
    figure = plots.loss_curves(
        {"MoE": (range(100), losses)},
        points={"MoE": ([49, 99], [3.6, 2.1]), "other": ([99], [2.4])},
        ylabel="bits per byte",
    )
    axes = figure.axes[0]
    raw, mean, points, other = axes.lines
    np.testing.assert_array_equal(raw.get_ydata(), losses)
    assert mean.get_ydata()[0] == losses[0]
    np.testing.assert_allclose(mean.get_ydata()[1:], (losses[1:] + losses[:-1]) / 2)
    np.testing.assert_array_equal(points.get_xdata(), [49, 99])
    assert points.get_color() == mean.get_color() != other.get_color()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "MoE",
        "MoE, validation",
        "other",
    ]
    assert axes.get_ylabel() == "bits per byte"
    assert axes.get_ylim()[0] < 2 < 3.6 < axes.get_ylim()[1]
    figure.savefig(tmp_path / "loss.png")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.load_heatmap(np.ones((3, 4))), r"\(3, 4\)"),
        (lambda: plots.load_heatmap(np.ones((3, 0, 4))), r"\(3, 0, 4\)"),
        (lambda: plots.load_heatmap(make_load(), layers=["one"]), "2 layer names"),
        (lambda: plots.load_heatmap(make_load(), steps=[1, 2]), "6 steps"),
        (lambda: plots.loss_curves({}), "at least one curve"),
        (lambda: plots.loss_curves({"a": ([1, 2], [3.0])}), "'a'.*2 and 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_missing_matplotlib_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"moe-flax\[plots\]"):
        plots.load_heatmap(make_load())
