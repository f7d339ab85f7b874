"""Every golden fixture: parameters read from its files give the outputs that transformers gave."""

import numpy_moe
import pytest
from golden import FIXTURES, NAMES, golden_of, relative_error, router_inputs_of

from moe_flax.checkpoint.mapping import read
from moe_flax.checkpoint.source import open_source


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_transformers(name):
    source = open_source(FIXTURES / name)
    inputs, outputs = golden_of(FIXTURES / name)
    assert tuple(source.layers) == tuple(outputs)
    for index, expected in outputs.items():
        parameters = {key: read(value) for key, value in source.parameters(index).items()}
        config = source.layers[index].config
        got = numpy_moe.forward(parameters, config, inputs, router_inputs_of(FIXTURES / name))
        assert relative_error(got, expected) < 1e-5
