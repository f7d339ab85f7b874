"""Shorthand for the table: the few ways in which families name and lay out a layer's tensors."""

from moe_flax.checkpoint.schema import Entry, Form

Entries = tuple[Entry, ...]
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")  # w1 is the gate, w3 the up, w2 the down projection


def router(key: str, **vectors: str) -> Entries:
    """The router's kernel [R, D], and its vectors [R] by parameter name."""
    more = (Entry(f"router.{name}", stored, "R") for name, stored in vectors.items())
    return (Entry("router.kernel", key, "R D"), *more)


def shared(block: str, names: tuple[str, str, str] = GATE_UP_DOWN, gate: str = "") -> Entries:
    """Shared experts as three Linear weights, and the key of their own gate [1, D]."""
    gate_name, up, down = names
    entries = (
        Entry("shared.wi", block + "{J}.weight", "S D", (gate_name, up)),
        Entry("shared.wo", f"{block}{down}.weight", "D S"),
    )
    return (*entries, Entry("shared.gate", gate, "1 D")) if gate else entries


def per_expert(block: str, names: tuple[str, str, str] = GATE_UP_DOWN) -> Entries:
    """Three Linear weights an expert: ``experts.{E}.gate_proj.weight`` [F, D] and so on."""
    gate, up, down = names
    return (
        Entry("experts.wi", block + "experts.{E}.{J}.weight", "F D", (gate, up)),
        Entry("experts.wo", f"{block}experts.{{E}}.{down}.weight", "D F"),
    )


def stacked(wi: str, wo: str, axes: tuple[str, str] = ("E (J F) D", "E D F")) -> Entries:
    """All experts in two tensors; by default [E, 2F, D], gates first, and [E, D, F]."""
    return (Entry("experts.wi", wi, axes[0]), Entry("experts.wo", wo, axes[1]))


def fused(block: str, axes: tuple[str, str] = ("E (J F) D", "E D F")) -> Entries:
    """`stacked`, under the names that transformers has for them."""
    return stacked(block + "experts.gate_up_proj", block + "experts.down_proj", axes)


def two_forms(
    block: str,
    names: tuple[str, str, str],
    common: Entries,
    memory: Entries | None = None,
    memory_block: str | None = None,
) -> tuple[Form, Form]:
    """A tensor an expert and projection, or fused.

    Args:
      block: key prefix of the MoE block.
      names: the gate, up and down projections of an expert.
      common: the other entries.
      memory: the other entries of the fused form, where transformers renames them in memory.
      memory_block: the fused form's block, likewise.
    """
    other = common if memory is None else memory
    return (
        Form("per_expert", common + per_expert(block, names)),
        Form("fused", other + fused(block if memory_block is None else memory_block)),
    )
