"""The routed half of a MoE layer as others offer it: what `moe_flax.bench` measures ours beside."""

import functools
import importlib.util
import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PEERS = ("ragged_dot", "tokamax", "torch")


class Problem(tp.NamedTuple):
    """One layer's operands; the routing is [T, K] ids and weights."""

    tokens: Float[Array, "T D"]
    wi: Float[Array, "E 2 D F"]
    wo: Float[Array, "E F D"]
    ids: Int[Array, "T K"]
    weights: Float[Array, "T K"]


class Candidate(tp.NamedTuple):
    """Something to time: ``run`` starts one pass, ``wait`` waits for what it returned."""

    run: tp.Callable[[], tp.Any]
    wait: tp.Callable[[tp.Any], tp.Any]


def missing(name: str, platform: str) -> str | None:
    """Says why a peer cannot run on "cpu", "gpu" or "tpu", or returns None."""
    if name == "ragged_dot":
        return None
    if importlib.util.find_spec(name) is None:
        return "not installed"
    if name == "tokamax":
        return None
    import torch

    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm; 2.10 and newer have"
    if platform == "gpu" and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    return None if platform in ("cpu", "gpu") else f"it does not run on {platform}"


def make(name: str, problem: Problem, train: bool) -> Candidate:
    """Prepares a peer's forward pass, or with ``train`` forward and backward."""
    if name == "torch":
        return _torch_candidate(problem, train)
    if name == "tokamax":
        import tokamax

        product = tokamax.ragged_dot
    else:
        product = jax.lax.ragged_dot
    wi = jnp.swapaxes(problem.wi, 1, 2)  # the layout that one product takes: [E, D, 2F]
    wi = wi.reshape(*wi.shape[:2], -1)
    return jax_candidate(functools.partial(ragged_layer, product), problem._replace(wi=wi), train)


def jax_candidate(layer: tp.Callable, problem: Problem, train: bool) -> Candidate:
    """Jits ``layer(tokens, wi, wo, ids, weights)``, or its result with all four gradients."""

    def both(tokens, wi, wo, ids, weights):
        y, pull = jax.vjp(lambda x, a, b, w: layer(x, a, b, ids, w), tokens, wi, wo, weights)
        return y, pull(tokens)

    compiled = jax.jit(both if train else layer).lower(*problem).compile()
    return Candidate(lambda: compiled(*problem), jax.block_until_ready)


def ragged_layer(product, tokens, wi, wo, ids, weights) -> Float[Array, "T D"]:
    """The layer around a product of [M, K] x [G, K, N] by group sizes; wi is [E, D, 2F]."""
    num_tokens, k = ids.shape
    order = jnp.argsort(ids.ravel(), stable=True)
    sizes = jnp.bincount(ids.ravel(), length=wi.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(product(tokens[order // k], wi, sizes), 2, axis=-1)
    rows = product(jax.nn.silu(gate) * up, wo, sizes)
    inverse = jnp.argsort(order)
    rows = rows[inverse].reshape(num_tokens, k, -1)
    return (rows * weights[:, :, None]).sum(1).astype(tokens.dtype)


def _torch_candidate(problem: Problem, train: bool) -> Candidate:
    """Eager on CPU; on a GPU compiled, and the forward replayed as a CUDA graph."""
    import torch

    tokens, wi, wo, ids, weights = (torch.from_dlpack(x) for x in problem)
    wi = wi.transpose(1, 2).flatten(2).contiguous()
    leaves = [x.detach().requires_grad_(train) for x in (tokens, wi, wo, weights)]
    on_gpu = tokens.is_cuda
    layer: tp.Any = torch.compile(torch_layer, dynamic=False) if on_gpu else torch_layer

    def step():
        y = layer(*leaves[:3], ids, leaves[3])
        return (y, torch.autograd.grad(y, leaves, tokens)) if train else y

    if not on_gpu:
        return Candidate(step, lambda _: None)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    run: tp.Callable[[], tp.Any] = step
    if not train:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    return Candidate(run, lambda _: torch.cuda.synchronize())


def torch_layer(tokens, wi, wo, ids, weights):
    """`ragged_layer` in torch, on ``torch.nn.functional.grouped_mm``."""
    import torch

    grouped_mm: tp.Any = torch.nn.functional.grouped_mm  # pyright: ignore
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    experts = torch.arange(wi.shape[0], device=tokens.device)
    ends = torch.searchsorted(flat[order], experts, right=True).to(torch.int32)
    gate, up = grouped_mm(tokens[order // ids.shape[1]], wi, offs=ends).chunk(2, -1)
    rows = grouped_mm(torch.nn.functional.silu(gate) * up, wo, offs=ends)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=tokens.device)
    rows = rows[inverse].view(*ids.shape, -1)
    return (rows * weights[:, :, None]).sum(1).to(tokens.dtype)
