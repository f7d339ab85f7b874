"""The fixtures that transformers wrote, and checkpoints that tests take apart, as plain dicts."""

import functools
import json
import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/golden.bin"))
FAMILIES = sorted({name.rsplit("-", 1)[0] for name in NAMES})


def tensors_of(path):
    """Every tensor of a directory, read by the reference implementation; copies."""
    found = {}
    for file in sorted(pathlib.Path(path).glob("*.safetensors")):
        found.update(load_file(file))
    return found


def config_of(path):
    """Its config.json."""
    return json.loads((pathlib.Path(path) / "config.json").read_text())


def golden_of(path):
    """(inputs, {layer: outputs}) of a fixture."""
    golden = load_file(pathlib.Path(path) / "golden.bin")
    outputs = {int(n.split(".")[1]): value for n, value in golden.items() if "outputs." in n}
    return golden["inputs"], outputs


def router_inputs_of(path):
    """What the router of a fixture sees where the experts see something else, or None."""
    return load_file(pathlib.Path(path) / "golden.bin").get("router_inputs")


def write(path, tensors, config, shards=1):
    """Writes a directory with the reference implementation, dealt over so many shards."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[i::shards]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def relative_error(value, reference):
    """‖value − reference‖ / ‖reference‖, in float64."""
    value, reference = (np.asarray(x).astype(np.float64) for x in (value, reference))
    return np.linalg.norm(value - reference) / np.linalg.norm(reference)


@functools.cache
def fixture(name):
    """(tensors, config) of a fixture; do not write into them."""
    return tensors_of(FIXTURES / name), config_of(FIXTURES / name)
