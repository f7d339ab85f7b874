"""The layer on the fused TPU kernel: interpreted, and lowered for a TPU mesh that is not there."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from test_mesh import BIASES, assert_close, expected, inputs, make_layer, set_bias, step

from moe_flax import MoE, RouterConfig
from moe_flax.kernels.fused_ep import BlockSizes
from moe_flax.parallel import Fused, choose_fused
from moe_flax.quantize import quantize_channels
from moe_flax.sharding import resolve_axes

INTERPRETED = Fused(interpret=True)


def make_mesh(kind=AxisType.Auto, **sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices
    )


def tpu_mesh(kind="TPU v6 lite", platform="tpu", axis_type=AxisType.Auto, **sizes):
    return AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(axis_type,) * len(sizes),
        abstract_device=AbstractDevice(kind, 1, platform),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kind", "shape"),
    [
        ({"data": 2, "expert": 2}, AxisType.Auto, (2, 11, 16)),  # 22 tokens do not divide over 4
        ({"expert": 4}, AxisType.Auto, (2, 11, 16)),
        ({"expert": 4}, AxisType.Explicit, (16, 16)),
        ({"tensor": 2, "expert": 2, "fsdp": 2}, AxisType.Auto, (2, 11, 16)),
    ],
    ids=["data2-expert2", "expert4", "expert4-explicit", "tensor2-expert2-fsdp2"],
)
def test_equals_one_device(sizes, kind, shape):
    """Outputs, gradients of all inputs, losses and the bias update, balanced and skewed."""
    x, results = inputs(*shape), expected(shape)
    with jax.set_mesh(make_mesh(kind, **sizes)):
        for routing in BIASES:
            layer = make_layer(expert_parallel=INTERPRETED)
            set_bias(layer, BIASES[routing])
            assert_close(step(layer, x), results[routing])


@pytest.mark.interpret
def test_values_and_gradients_equal_all_gather():
    """Five tokens do not divide over four devices; an even load, and all tokens on one expert."""
    mesh, x = make_mesh(data=2, expert=2), inputs(5, 16)
    router, init = RouterConfig(correction_bias=True), nnx.initializers.normal(0.3)

    @nnx.jit
    def run(layer, x):
        def loss(layer, x):
            y = layer(x)
            return jnp.sum(jnp.sin(y)), y

        (_, y), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
        return y, nnx.to_pure_dict(grads[0]), grads[1]

    for bias in (np.zeros(4), np.array([0.0, 0.0, 50.0, 0.0])):
        results = []
        for strategy in (INTERPRETED, "all_gather"):
            layer = MoE(
                16,
                12,
                4,
                1,
                router=router,
                use_bias=True,
                kernel_init=init,
                bias_init=init,
                expert_parallel=strategy,
                mesh=mesh,
                rngs=nnx.Rngs(0),
            )
            set_bias(layer, bias)
            results.append(run(layer, x))
        assert_close(*results)


@pytest.mark.slow
def test_equals_one_device_in_bf16_with_block_sizes():
    def layer(**kwargs):
        return make_layer(dtype=jnp.bfloat16, **kwargs)

    x = inputs(9, 16)
    fused = dataclasses.replace(INTERPRETED, block_sizes=BlockSizes(rows=16, receive_rows=5))
    with jax.set_mesh(make_mesh(expert=4)):  # interpreted, all devices must take as many passes
        out = nnx.jit(lambda m, x: m(x))(layer(expert_parallel=fused), x)
    assert out.dtype == jnp.bfloat16
    assert_close(out, make_layer()(x), bound=1.2e-2)


@pytest.mark.slow
def test_inside_a_callers_shard_map():
    layer, x = make_layer(expert_parallel=INTERPRETED), inputs(16, 16)
    graph, state = nnx.split(layer)
    mesh, spec = make_mesh(expert=4), P("expert")

    def specs(path, _):
        return spec if "experts" in jax.tree_util.keystr(path) else P()

    def run(check):
        return jax.jit(
            jax.shard_map(
                lambda s, x: nnx.merge(graph, s)(x),
                mesh=mesh,
                in_specs=(jax.tree_util.tree_map_with_path(specs, state), spec),
                out_specs=spec,
                check_vma=check,
            )
        )(state, x)

    assert_close(run(False), make_layer()(x))
    with pytest.raises(ValueError, match="inside a caller's shard_map needs check_vma=False"):
        run(True)


def kernels_of(function, mesh, *arguments):
    """The kernels in a program for a mesh's TPUs, by name; what is called twice is there once."""
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return collections.Counter(re.findall(r'kernel_name = "(\w+)"', lowered.as_text()))


def test_auto_takes_the_kernel_on_a_tpu_mesh():
    """One kernel forward; dispatch and return of the gradient besides, with its FFN in products."""
    layer = MoE(128, 128, 4, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def loss(state, x):
        return jnp.sum(nnx.merge(graph, state)(x))

    x = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    mesh = tpu_mesh(data=2, expert=2)
    forward = {"moe_pack_rows": 1, "moe_fused_ffn": 1, "moe_unpack_rows": 1}
    assert kernels_of(loss, mesh, state, x) == forward
    found = kernels_of(jax.grad(loss), mesh, state, x)
    assert set(found) == {*forward, "moe_dispatch", "moe_give_back"}
    assert found["moe_fused_ffn"] == found["moe_dispatch"] == found["moe_give_back"] == 1


@pytest.mark.parametrize(("wanted", "kernels"), [("auto", 0), (Fused(method="fused"), 1)], ids=str)
def test_short_batches_are_replicated(wanted, kernels):
    """One token a device and 128 experts: the cost model takes the fallback, unless told not to."""
    layer = nnx.eval_shape(
        lambda: MoE(1024, 512, 128, 8, expert_parallel=wanted, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16)
    mesh = tpu_mesh(expert=8)
    found = kernels_of(lambda state, x: nnx.merge(graph, state)(x), mesh, state, x)
    assert found["moe_fused_ffn"] == kernels
    assert found["kernel"] == 2 * (1 - kernels)  # megablox', up and gate sharing one


def test_what_auto_and_fused_mean():
    tpu, gpu = tpu_mesh(data=2, expert=2), tpu_mesh("NVIDIA H200", "cuda", data=2, expert=2)

    def chosen(wanted, mesh, dtype="float32", **rules):
        return choose_fused(wanted, resolve_axes(mesh, rules), dtype)

    assert chosen("auto", tpu) == chosen("fused", tpu) == Fused(chip="v6e")
    assert chosen("auto", tpu_mesh("TPU7x", expert=2), "bfloat16").chip == "tpu7x"
    assert chosen(Fused(method="replicated"), tpu) == Fused(method="replicated", chip="v6e")
    assert chosen(Fused(chip="v5e"), tpu).chip == "v5e"
    assert chosen("auto", tpu, "float16") == "auto"
    assert chosen("auto", gpu) == chosen("auto", tpu_mesh(data=4)) == "auto"
    assert chosen("fused", tpu_mesh(data=4)) == "auto"  # no experts' axis: nothing travels
    assert chosen("fused", tpu, tokens="data") == "auto"  # whole tokens there already: one sum
    assert choose_fused("fused", None, "float32") == "auto"
    for name in ("none", "all_gather", "all_to_all"):
        assert chosen(name, tpu) == name
    assert chosen(INTERPRETED, gpu).interpret is True
    with pytest.raises(TypeError, match=r"'fused' computes in one of .*got float16"):
        chosen("fused", tpu, "float16")
    with pytest.raises(ValueError, match=r"'fused' runs on TPUs, and the platform is 'gpu'"):
        chosen("fused", gpu)


def test_refusals():
    x = inputs(8, 16)
    with jax.set_mesh(make_mesh(expert=4)):
        layer = make_layer(expert_parallel="fused")
        with pytest.raises(ValueError, match=r"platform is 'cpu'.*'auto'.*Fused\(interpret=True\)"):
            layer(x)
    assert_close(make_layer(expert_parallel="fused")(x), make_layer()(x))  # on one device: none
    with pytest.raises(ValueError, match=r"method must be one of .*got 'magic'"):
        Fused(method="magic")


@pytest.mark.interpret
def test_quantised_experts_equal_all_gather():
    """int8 an output channel, the way that the kernel reads: the contraction before it."""
    x, found = inputs(2, 4, 16), []
    for strategy in (INTERPRETED, "all_gather"):
        layer = make_layer(expert_parallel=strategy)
        held = [quantize_channels(w[...], axis=-2) for w in (layer.experts.wi, layer.experts.wo)]
        (wi, wi_scale), (wo, wo_scale) = held
        layer.experts.hold_quantized(wi, wo, wi_scale, wo_scale)
        with jax.set_mesh(make_mesh(expert=2)):
            found.append(nnx.jit(lambda m, x: m(x))(layer, x))
    assert jnp.linalg.norm(found[0] - found[1]) < 1e-5 * jnp.linalg.norm(found[1])


def test_transposed_weights_take_another_strategy():
    axes = resolve_axes(tpu_mesh(expert=8))
    assert choose_fused("auto", axes, jnp.bfloat16, transposed=True) == "auto"
    assert isinstance(choose_fused("auto", axes, jnp.bfloat16), Fused)
    with pytest.raises(ValueError, match="load it with transposed=False"):
        choose_fused("fused", axes, jnp.bfloat16, transposed=True)
