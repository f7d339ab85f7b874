"""Training over a mesh: one compiled step, a progress bar, expert load kept even.

The correction bias is moved after each step by the load that the step saw. ``Balance`` says how:
plain numbers of the step, so that one compiled function serves the whole run.
"""

import dataclasses
import math
import sys
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import Corpus, even_windows, random_windows
from decoder import Decoder
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm


@dataclasses.dataclass(frozen=True)
class Balance:
    """How expert load is kept even: by nothing, then by the bias, then by the loss.

    Args:
      bias_from: step from which the load moves the correction bias.
      bias_until: step from which the bias is let go: it shrinks to exactly 0 by the last step
        while the load-balancing loss takes over. For formats without a correction bias.
      rate: first step of the bias, in units of the router's scores; it falls to 0 by
        ``bias_until``, so that identical bytes stop changing experts.
      loss_coefficient: of the load-balancing loss, once the bias is let go.
    """

    bias_from: int
    bias_until: int
    rate: float
    loss_coefficient: float

    def at(self, step: int, steps: int) -> tuple[float, float, float]:
        """Rate of the bias, factor on the bias, and coefficient of the loss."""
        if step < self.bias_from:
            return 0.0, 1.0, 0.0
        if step < self.bias_until:
            share = (step - self.bias_from) / (self.bias_until - self.bias_from)
            return self.rate * (1 - share), 1.0, 0.0
        left = steps - step
        return 0.0, (left - 1) / left, self.loss_coefficient


@dataclasses.dataclass
class History:
    """What a run recorded.

    Attributes:
      train: bits per byte of each step's batch.
      validation: (step, bits per byte) as training went on; the last is the final model's.
      load: [steps, layers, E], tokens that each expert took; no layers for a dense model.
    """

    train: list[float]
    validation: list[tuple[int, float]]
    load: np.ndarray


def bits_per_byte(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy of bytes, in bits."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return nats / math.log(2)


def place(tree: tp.Any, mesh: Mesh) -> tp.Any:
    """Copies to every device what is not laid over the mesh already."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def move(x: jax.Array) -> jax.Array:
        laid = isinstance(x.sharding, NamedSharding) and x.sharding.mesh.size == mesh.size
        return x if laid else jax.device_put(x, everywhere)

    return jax.tree.map(move, tree)


def make_decoder(config: tp.Any, mesh: Mesh, seed: int) -> Decoder:
    """A decoder whose experts are spread over the mesh and whose other weights are everywhere."""
    with jax.set_mesh(mesh):
        model = Decoder(config, rngs=nnx.Rngs(seed))
        nnx.update(model, place(nnx.state(model), mesh))
    return model


def split_batch(batch: np.ndarray, mesh: Mesh) -> jax.Array:
    """Sequences dealt out to all devices."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))


def train(
    model: Decoder,
    corpus: Corpus,
    mesh: Mesh,
    *,
    name: str,
    steps: int,
    batch: int,
    context: int,
    learning_rate: float,
    balance: Balance,
    seed: int = 0,
    validate_every: int = 50,
    validation_batches: int = 2,
) -> History:
    """Trains ``model`` in place with AdamW; the same seed gives the same batches to any model."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, steps // 10, steps, learning_rate / 20
    )
    optimizer = nnx.Optimizer(
        model,
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01)
        ),
        wrt=nnx.Param,
    )
    graph, state = nnx.split((model, optimizer))
    state = place(state, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, state)

    def step(state, tokens, rate, keep, coefficient):
        model, optimizer = nnx.merge(graph, state)

        def objective(model):
            logits, reports = model(tokens[:, :-1])
            bits = bits_per_byte(logits, tokens[:, 1:])
            uneven = sum(report.load_balancing_loss for report in reports)
            return bits + coefficient * uneven, (bits, reports)

        (_, (bits, reports)), grads = nnx.value_and_grad(objective, has_aux=True)(model)
        optimizer.update(model, grads)
        for layer, report in zip(model.moe_layers(), reports, strict=True):
            bias = layer.router.correction_bias
            if bias is not None:
                layer.update_correction_bias(report.tokens_per_expert, rate)
                bias[...] *= keep
        load = jnp.array([report.tokens_per_expert for report in reports])
        return nnx.state((model, optimizer)), bits, load

    compiled = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None, None))
    rng = np.random.default_rng(seed)
    history = History([], [], np.zeros(0))
    loads = []
    evaluate = evaluator(model, corpus, mesh, batch, context, validation_batches)
    interval = 0.2 if sys.stderr.isatty() else 10.0
    with jax.set_mesh(mesh), tqdm(total=steps, desc=name, mininterval=interval) as bar:
        for index in range(steps):
            tokens = split_batch(random_windows(corpus.train, batch, context + 1, rng), mesh)
            state, bits, load = compiled(state, tokens, *balance.at(index, steps))
            history.train.append(float(bits))
            loads.append(np.asarray(load))
            if (index + 1) % validate_every == 0 or index + 1 == steps:
                nnx.update((model, optimizer), state)
                history.validation.append((index + 1, evaluate(model)))
            bar.set_postfix(bits_per_byte=f"{history.train[-1]:.3f}", refresh=False)
            bar.update()
    history.load = np.stack(loads)
    return history


def evaluator(
    model: Decoder, corpus: Corpus, mesh: Mesh, batch: int, context: int, batches: int
) -> tp.Callable[[Decoder], float]:
    """A function of a decoder like ``model``: its bits per byte on fixed validation text."""
    graph = nnx.graphdef(model)

    @jax.jit
    def bits(state, tokens):
        return bits_per_byte(nnx.merge(graph, state)(tokens[:, :-1])[0], tokens[:, 1:])

    windows = even_windows(corpus.validation, batch * batches, context + 1)
    parts = [split_batch(part, mesh) for part in np.split(windows, batches)]

    def evaluate(model: Decoder) -> float:
        with jax.set_mesh(mesh):
            return float(np.mean([float(bits(nnx.state(model), part)) for part in parts]))

    return evaluate
