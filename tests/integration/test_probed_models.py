"""`megamem probe information` of memory models, of other weights than before, and what is refused in one line."""

from __future__ import annotations

import json
import math

import pytest

from tests.integration.commands import run_tree, write_config
from tests.integration.ranks import Job, command
from tests.integration.test_models import refused

pytestmark = pytest.mark.distributed

ENCODER = {"layers": 2, "hidden_size": 16, "heads": 2}
MODELS = {
    "plain": {"mixer": "full_attention", "memory": []},
    "memory": {"memory": [], "layers": 3, "architecture": {"kind": "memory_model", "encoder": ENCODER, "slots": 3}},
    "recurrent": {"mixer": "full_attention", "memory": [], "architecture": {"kind": "recurrent_memory"}},
}


def succeeds(folder, *words):
    """stdout of a command of its own process."""
    with Job(folder / f"job-{len(list(folder.iterdir()))}", 1, command, *map(str, words)) as job:
        assert job.codes(90) == [0], job.output(0) + job.output(0, "err")
        return job.output(0, "out")


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Folder of a run of two steps of each model."""
    folder = tmp_path_factory.mktemp("probed")
    for name, model in MODELS.items():
        tree = run_tree(data, folder / "runs", name=name, model=model, training={"steps": 2})
        succeeds(folder, "train", write_config(folder / f"{name}.yaml", tree))
    return folder / "runs"


@pytest.mark.parametrize("untrained", [False, True])
def test_the_encoder_of_a_memory_model_is_looked_into(runs, untrained, tmp_path):
    out = tmp_path / "decoder"
    words = ["probe", "information", runs / "memory", "--out", out, *(["--untrained"] if untrained else [])]
    printed = succeeds(tmp_path, *words, "--json")
    report = json.loads((out / "information.json").read_text())
    assert json.loads(printed.strip().splitlines()[-1])["loss"] == report["loss"]
    assert report["entropy_ratio"] == pytest.approx(1 - report["loss"] / math.log(report["vocabulary"]))
    assert report["embedding_size"] == 16
    assert (out / "information.png").exists()


def test_a_probe_of_other_weights_does_not_go_on(runs, tmp_path):
    """Its decoder stands behind the weights that it began with, whatever model is named."""
    out = tmp_path / "decoder"
    succeeds(tmp_path, "probe", "information", runs / "plain", "--out", out)
    expected = f"{out}.encoder.safetensors: holds the weights of another model; choose another --out"
    for other in ([runs / "memory"], [runs / "plain", "--untrained"]):
        assert refused("probe", "information", *other, "--out", out) == expected
    # though the file has gone, the decoder's checkpoint has the weights
    (tmp_path / "decoder.encoder.safetensors").unlink()
    assert refused("probe", "information", runs / "memory", "--out", out) == expected


def test_what_cannot_be_probed_is_refused_in_one_line(runs, tmp_path):
    plain = runs / "plain"
    assert refused("probe", "information", runs / "recurrent").startswith(f"{runs / 'recurrent'}: what a recurrent")
    blocked = plain / "config.yaml" / "decoder"
    assert refused("probe", "information", plain, "--out", blocked).startswith(
        f"{blocked}.encoder.safetensors: cannot be written"
    )
    sizes = {"layers": 2, "hidden_size": 32, "heads": 4, "vocab_size": 320, "chunk_size": 32}
    write_config(tmp_path / "model.yaml", {"model": sizes})
    assert refused("probe", "information", tmp_path).endswith("weights.safetensors: no such weights file")
    out = ("--out", tmp_path / "decoder")
    assert "data.validation is empty" in refused("probe", "information", plain, "data.validation=[]", *out)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {layers: 2}\n")
    assert "data.sources" in refused("probe", "information", plain, "--recipe", recipe, *out)
    recipe.write_text("training: 3\n")
    assert f"the recipe for {plain}: training: expected a section" in refused(
        "probe", "information", plain, "--recipe", recipe, *out
    )
