"""examples/training.py and corpus.py: the text, the balance schedule, a step over a mesh."""

import corpus
import jax
import numpy as np
import pytest
from decoder import DecoderConfig
from jax.sharding import AxisType
from training import Balance, make_decoder, train

import moe_flax

MOE = DecoderConfig(
    features=16,
    num_layers=1,
    num_heads=2,
    moe=moe_flax.MoEConfig(
        features=16,
        hidden_features=16,
        num_experts=4,
        num_experts_per_token=2,
        router=moe_flax.RouterConfig(correction_bias=True),
    ),
)
TEXT = corpus.Corpus(
    np.frombuffer(b"def f(x):\n    return x\n" * 40, np.uint8),
    np.frombuffer(b"def g(y):\n    return y\n" * 10, np.uint8),
    2,
)
SIZES = {
    "name": "t",
    "steps": 4,
    "batch": 8,
    "context": 8,
    "learning_rate": 1e-2,
    "validation_batches": 1,
}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def test_standard_library_is_split_by_file_and_the_same_every_time():
    first, second = corpus.standard_library(), corpus.standard_library()
    np.testing.assert_array_equal(first.train, second.train)
    assert len(first.train) > 5 * len(first.validation) > 500_000
    window = bytes(first.validation[1000:1200])
    assert window not in bytes(first.train)


def test_windows_are_pieces_of_the_text():
    text = np.arange(50, dtype=np.uint8)
    for windows in (
        corpus.random_windows(text, 6, 5, np.random.default_rng(0)),
        corpus.even_windows(text, 6, 5),
    ):
        assert windows.shape == (6, 5)
        np.testing.assert_array_equal(np.diff(windows), 1)
    assert corpus.even_windows(text, 6, 5)[[0, -1], [0, -1]].tolist() == [0, 49]


def test_balance_goes_from_nothing_to_the_bias_to_the_loss():
    balance = Balance(bias_from=2, bias_until=6, rate=0.1, loss_coefficient=0.5)
    assert balance.at(1, 10) == (0.0, 1.0, 0.0)
    assert balance.at(2, 10) == (0.1, 1.0, 0.0)
    assert balance.at(5, 10) == (pytest.approx(0.025), 1.0, 0.0)  # the last of four
    bias = 8.0
    for step in range(6, 10):
        rate, keep, coefficient = balance.at(step, 10)
        assert (rate, coefficient) == (0.0, 0.5)
        bias *= keep
        assert bias == pytest.approx(8.0 * (9 - step) / 4)
    assert bias == 0.0


@pytest.mark.parametrize("until", [4, 2], ids=["bias kept", "bias let go"])
def test_training_moves_the_bias_and_lets_it_go(mesh, until):
    model = make_decoder(MOE, mesh, seed=0)
    router = model.layers[0].feed_forward.router
    before = np.asarray(router.kernel[...])
    history = train(model, TEXT, mesh, balance=Balance(1, until, 0.25, 0.01), **SIZES)
    assert history.load.shape == (4, 1, 4)
    np.testing.assert_array_equal(history.load.sum(axis=-1), 8 * 8 * 2)
    assert history.train[-1] < history.train[0]
    assert [step for step, _ in history.validation] == [4]
    assert np.any(np.asarray(router.kernel[...]) != before)
    bias = np.asarray(router.correction_bias[...])
    if until == 4:  # as numpy has it, from the loads that were recorded
        loads = history.load[1:, 0]
        moves = np.sign(loads.mean(axis=-1, keepdims=True) - loads)
        expected = np.array([3, 2, 1]) / 3 * 0.25 @ moves
        np.testing.assert_allclose(bias, expected, rtol=1e-5, atol=1e-6)
        assert np.any(bias)
    else:
        np.testing.assert_array_equal(bias, 0)
    wi = model.layers[0].feed_forward.experts.wi[...]
    assert wi.addressable_shards[0].data.shape[0] == 1  # four experts over expert=4
