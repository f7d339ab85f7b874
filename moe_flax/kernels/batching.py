"""``jax.vmap`` for kernels that have no batching rule: the batch, one after another."""

import typing as tp

import jax


def one_by_one(function: tp.Callable) -> tp.Callable:
    """Has ``jax.vmap`` map a function of pytrees of arrays over its batch in a loop.

    Operands without a batch axis are not copied. The function is not to be differentiated: its
    callers bring gradients of their own.
    """
    batchable = jax.custom_batching.custom_vmap(function)

    @batchable.def_vmap
    def _(_, batched, *operands):
        leaves, tree = jax.tree.flatten(operands)
        flags = jax.tree.leaves(batched)

        def one(mapped):
            mapped = iter(mapped)
            picked = [next(mapped) if b else x for x, b in zip(leaves, flags, strict=True)]
            return batchable(*jax.tree.unflatten(tree, picked))

        out = jax.lax.map(one, [x for x, b in zip(leaves, flags, strict=True) if b])
        return out, jax.tree.map(lambda _: True, out)

    return batchable
