"""A mixture-of-experts layer in float64 NumPy, straight from its definition: the tests' own oracle.

Shares nothing with the library but the configuration dataclasses.
"""

import math

import numpy as np

from moe_flax.activations import resolve_activation

_erf = np.vectorize(math.erf)


def _softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


_FUNCTIONS = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def _activate(branches, activation):
    a = resolve_activation(activation)
    limit = a.limit or np.inf
    g = np.minimum(branches[0], limit) if a.clamp == "before" else branches[0]
    g = g * _sigmoid(a.alpha * g) if a.function == "silu" else _FUNCTIONS[a.function](g)
    if a.clamp == "after":
        g = np.minimum(g, limit)
    return g if len(branches) == 1 else g * (np.clip(branches[1], -limit, limit) + a.up_offset)


def _choose(choice, router, k):
    if router.num_groups > 1:
        t, e = choice.shape
        groups = choice.reshape(t, router.num_groups, -1)
        best = np.sort(groups, -1)
        value = best[..., -1] if router.group_score == "max" else best[..., -2:].sum(-1)
        kept = np.argsort(-value, -1, kind="stable")[:, : router.num_selected_groups]
        mask = np.zeros_like(value, bool)
        np.put_along_axis(mask, kept, True, -1)
        hidden = -np.inf if router.group_mask == "-inf" else 0.0
        choice = np.where(mask[..., None], groups, hidden).reshape(t, e)
    return np.argsort(-choice, -1, kind="stable")[:, :k]


def _sparse_mixer(logits, jitter):
    ids, weights = [], []
    masked = logits.copy()
    for _ in range(2):
        top = masked.max(-1, keepdims=True)
        factor = np.maximum(np.abs(logits), top)
        kept = np.where((top - logits) / factor > 2 * jitter, -np.inf, masked)
        index = masked.argmax(-1)
        ids.append(index)
        weights.append(np.take_along_axis(_softmax(kept), index[:, None], -1)[:, 0])
        np.put_along_axis(masked, index[:, None], -np.inf, -1)
    return np.stack(ids, -1), np.stack(weights, -1)


def route(logits, router, k, p):
    """(ids, weights), each [T, K]."""
    if router.selection == "sparse_mixer":
        return _sparse_mixer(logits, router.jitter)
    scores = {
        "softmax": _softmax,
        "sigmoid": _sigmoid,
        "identity": lambda x: x,
        "sqrt_softplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
    }[router.score](logits)
    ids = _choose(scores + p.get("router.correction_bias", 0.0), router, k)
    weights = np.take_along_axis(scores, ids, -1)
    if router.weight_activation:
        weights = {"softmax": _softmax, "sigmoid": _sigmoid}[router.weight_activation](weights)
    if router.renormalize:
        norm = (np.abs(weights) ** router.renormalize_order).sum(-1, keepdims=True)
        norm = norm ** (1 / router.renormalize_order)
        epsilon = router.renormalize_epsilon
        add = router.renormalize_mode == "add"
        weights = weights / (norm + epsilon if add else np.maximum(norm, epsilon))
    weights = weights * router.scale
    if "router.per_expert_scale" in p:
        weights = weights * p["router.per_expert_scale"][ids]
    return ids, weights


def forward(parameters, config, x, router_input=None):
    """[T, D] to [T, D]; ``parameters`` by name, each anything that NumPy takes."""
    p = {name: np.asarray(value).astype(np.float64) for name, value in parameters.items()}
    x = np.asarray(x, np.float64)
    seen = x if router_input is None else np.asarray(router_input, np.float64)
    logits = seen @ p["router.kernel"] + p.get("router.bias", 0.0)
    if config.router.logit_softcap:
        logits = config.router.logit_softcap * np.tanh(logits / config.router.logit_softcap)
    ids, weights = route(logits, config.router, config.num_experts_per_token, p)
    y = np.zeros_like(x)
    for t, k in np.ndindex(ids.shape):
        e, w = ids[t, k], weights[t, k]
        if e >= config.num_experts:
            y[t] += w * x[t]
            continue
        row = x[t] * w if config.router.apply_to == "input" else x[t]
        h = np.einsum("d,jdf->jf", row, p["experts.wi"][e])
        if "experts.wi_bias" in p:
            h = h + p["experts.wi_bias"][e]
        out = _activate(h, config.activation) @ p["experts.wo"][e]
        if "experts.wo_bias" in p:
            out = out + p["experts.wo_bias"][e]
        y[t] += out if config.router.apply_to == "input" else w * out
    if config.shared is None:
        return y
    h = np.einsum("td,jds->jts", x, p["shared.wi"])
    shared = _activate(h, config.shared.activation or config.activation) @ p["shared.wo"]
    if config.shared.combine == "gated":
        shared = shared * _sigmoid(x @ p["shared.gate"])
    return (y + shared) / 2 if config.shared.combine == "average" else y + shared
