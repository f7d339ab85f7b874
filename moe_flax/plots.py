"""Pictures of a training run, expert load over time and loss curves, and of a benchmark."""

import typing as tp

import numpy as np
from jaxtyping import Float, Num

if tp.TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moe_flax.bench import Time

Curve: tp.TypeAlias = tuple[tp.Sequence[float], tp.Sequence[float]]

EVEN = 1.0


def load_heatmap(
    load: Num[np.ndarray, "S L E"],
    *,
    steps: tp.Sequence[float] | None = None,
    marks: tp.Mapping[float, str] | None = None,
    layers: tp.Sequence[str] | None = None,
    title: str = "Expert load",
) -> "Figure":
    """Draws how many tokens each expert took over time, a panel a layer.

    Colour is the load over the mean load of its layer and step: 1 is even, 0 is an idle expert;
    2 and more share the last colour.

    Args:
      load: [S, L, E], tokens that each expert took at S moments in L layers, such as stacked
        ``MoEAux.tokens_per_expert``.
      steps: the S moments, evenly spaced (default: 0, 1, ...).
      marks: moments to mark with a line, and what began there.
      layers: names of the L layers (default: "layer 0", ...).
      title: of the figure.

    Returns:
      A matplotlib Figure; ``figure.savefig("load.png")`` writes it.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: ``load`` is not [S, L, E], or names or steps do not fit it.
    """
    load = np.asarray(load)
    if load.ndim != 3 or 0 in load.shape:
        raise ValueError(
            f"load must be [steps, layers, experts], none of them 0, got shape {load.shape}"
        )
    count, num_layers, num_experts = load.shape
    steps = range(count) if steps is None else steps
    layers = [f"layer {i}" for i in range(num_layers)] if layers is None else layers
    if len(steps) != count or len(layers) != num_layers:
        raise ValueError(
            f"load of shape {load.shape} needs {count} steps and {num_layers} layer names, got"
            f" {len(steps)} and {len(layers)}"
        )
    figure = _figure(width=9, height=1.2 + 1.5 * num_layers)
    panels = figure.subplots(num_layers, 1, sharex=True, squeeze=False)[:, 0]
    half = (steps[-1] - steps[0]) / max(count - 1, 1) / 2 or 0.5
    extent = (steps[0] - half, steps[-1] + half, num_experts - 0.5, -0.5)
    images = []
    for panel, name, values in zip(panels, layers, relative_load(load), strict=True):
        image = panel.imshow(
            values.T,
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            vmin=0,
            vmax=2 * EVEN,
            extent=extent,
        )
        images.append(image)
        panel.set_ylabel(f"{name}\nexpert")
        panel.set_yticks(range(0, num_experts, max(1, num_experts // 8)))
        for moment in marks or {}:
            panel.axvline(moment, color="black", linewidth=1)
    for moment, text in (marks or {}).items():
        panels[0].text(moment, -0.7, f" {text}", ha="left", va="bottom", fontsize=9)
    panels[-1].set_xlabel("step")
    figure.suptitle(title)
    bar = figure.colorbar(images[0], ax=list(panels), extend="max")
    bar.set_label("load / mean load")
    return figure


def relative_load(load: Num[np.ndarray, "S L E"]) -> Float[np.ndarray, "L S E"]:
    """Load over the mean of its layer and step, layers first; an unused layer counts as even."""
    load = np.moveaxis(np.asarray(load, np.float64), 1, 0)
    mean = load.mean(axis=-1, keepdims=True)
    return np.divide(load, mean, out=np.full_like(load, EVEN), where=mean > 0)


def loss_curves(
    curves: tp.Mapping[str, Curve],
    *,
    points: tp.Mapping[str, Curve] | None = None,
    ylabel: str = "loss",
    title: str = "Training",
) -> "Figure":
    """Draws losses over steps, a line a run.

    Args:
      curves: name to (steps, losses), drawn thin with a running mean over a fiftieth of the run
        on top.
      points: name to (steps, losses) measured now and then, such as on validation data; drawn
        with markers, in the colour of the curve of the same name if there is one.
      ylabel: what the losses are, and their unit.
      title: of the figure.

    Returns:
      A matplotlib Figure.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there is nothing to draw, or steps and losses differ in number.
    """
    points = points or {}
    if not curves and not points:
        raise ValueError("loss_curves needs at least one curve or one row of points, got none")
    for name, (steps, losses) in [*curves.items(), *points.items()]:
        if len(steps) != len(losses) or not len(steps):
            raise ValueError(
                f"{name!r} needs as many steps as losses and at least one, got {len(steps)} and"
                f" {len(losses)}"
            )
    figure = _figure(width=8, height=5)
    axes = figure.subplots()
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys([*curves, *points]))}
    for name, (steps, losses) in curves.items():
        axes.plot(steps, losses, color=colors[name], alpha=0.25, linewidth=0.8)
        axes.plot(steps, _running_mean(losses), color=colors[name], label=name)
    for name, (steps, losses) in points.items():
        label = f"{name}, validation" if name in curves else name
        axes.plot(steps, losses, "o--", color=colors[name], markersize=4, label=label)
    lowest = min(min(losses) for _, losses in [*curves.values(), *points.values()])
    top = max(
        float(np.quantile(losses, 0.95)) for _, losses in [*curves.values(), *points.values()]
    )
    axes.set_ylim(lowest - 0.05 * (top - lowest or 1), top + 0.1 * (top - lowest or 1))
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(title)
    return figure


def benchmark(times: "tp.Sequence[Time]", *, title: str = "MoE layer") -> "Figure":
    """Draws the speed of each candidate, a panel a pass and a group of bars a token count.

    Args:
      times: what `moe_flax.bench.measure` returned; a black line above each group is the floor.
      title: of the figure.

    Returns:
      A matplotlib Figure.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there is nothing to draw.
    """
    if not times:
        raise ValueError("benchmark needs at least one time, got none")
    passes = list(dict.fromkeys(t.work for t in times))
    names = list(dict.fromkeys(t.name for t in times))
    counts = sorted({t.tokens for t in times})
    figure = _figure(width=4 + 2 * len(counts), height=1 + 3 * len(passes))
    panels = figure.subplots(len(passes), 1, squeeze=False)[:, 0]
    width = 0.8 / len(names)
    for panel, work in zip(panels, passes, strict=True):
        for i, name in enumerate(names):
            shown = [t for t in times if (t.work, t.name) == (work, name)]
            places = [counts.index(t.tokens) - 0.4 + (i + 0.5) * width for t in shown]
            speeds = [t.tflops for t in shown]
            panel.bar_label(panel.bar(places, speeds, width, label=name), fmt="%.3g", fontsize=8)
        floors = {t.tokens: t.tflops / t.floor for t in times if t.work == work}
        for tokens, floor in floors.items():
            place = counts.index(tokens)
            panel.plot([place - 0.4, place + 0.4], [floor, floor], color="black")
        panel.set_ylabel(f"{work}\nTFLOP/s")
        panel.set_xticks(range(len(counts)), [f"{count} tokens" for count in counts])
    panels[0].plot([], [], color="black", label="floor")
    panels[0].legend()
    figure.suptitle(title)
    return figure


def _running_mean(losses: tp.Sequence[float]) -> np.ndarray:
    """Mean of the last fiftieth of the run at each step, of fewer at its beginning."""
    width = max(1, len(losses) // 50)
    total = np.cumsum(np.concatenate([[0.0], losses]))
    end = np.arange(1, len(losses) + 1)
    start = np.maximum(end - width, 0)
    return (total[end] - total[start]) / (end - start)


def _figure(*, width: float, height: float) -> "Figure":
    """A figure of its own: no window, no pyplot state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "moe_flax.plots needs matplotlib: pip install 'moe-flax[plots]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained", dpi=120)
