"""A GPT-2 gets long-term memories, which learn alone: imported, trained under two layouts, exported, evaluated."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from megamem.pipeline.start_weights import open_weights
from tests.integration.commands import CHUNK, VOCABULARY, run_tree, write_config
from tests.integration.ranks import Job, command
from tests.integration.test_models import invoke, refused

pytestmark = pytest.mark.distributed

STOPPED = 75
MEMORY = "mixer={kind: infinity_former, basis: 8, widths: [0.1, 0.2], samples: 8, sticky: random}"


def test_a_memory_learns_alone_and_the_base_is_exported_as_it_was(data, tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CHUNK, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    start = tmp_path / "start"
    invoke("convert", "from-hf", tmp_path / "gpt2", start, f"chunk_size={CHUNK}", MEMORY)
    tree = run_tree(
        data, tmp_path / "runs", training={"steps": 4, "freeze": "base"},
        optimizer={"lr": 1e-3, "new_parameters_lr": 1e-2}, logging={"every": 1},
    )  # fmt: skip
    del tree["model"]
    recipe = write_config(tmp_path / "recipe.yaml", tree)
    outputs = []
    # the second part goes on under another layout
    for layout, ends in (("tp", ["training.stop_after=2"]), ("pp", [])):
        words = ["start-from", str(start), str(recipe), "name=books", f"parallel.{layout}=2", *ends]
        with Job(tmp_path / f"job-{layout}", 2, command, *words) as job:
            assert job.codes(90) == [STOPPED if ends else 0] * 2, job.output(0)
            outputs.append(" ".join(job.output(0, "out").split()))
    before, after = (
        load_file(start / "weights.safetensors"),
        load_file(tmp_path / "runs" / "books" / "model.safetensors"),
    )
    new = open_weights(start / "weights.safetensors").new_parameters
    assert before.keys() | new == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["layers.0.mixer.long_output.weight"].any(), "it started at zero"
    learning, total = (sum(after[name].numel() for name in names) for names in (new, after))
    for output in outputs:
        assert f"learning: {learning:,} new of {total:,} parameters" in output
    lines = (tmp_path / "runs" / "books" / "metrics.jsonl").read_text().splitlines()
    assert [record["step"] for record in map(json.loads, lines) if "loss" in record] == [1, 2, 3, 4]

    trained = json.loads((tmp_path / "runs" / "books" / "result.json").read_text())
    assert trained["val_loss"] != trained["memory_off_loss"]
    invoke("convert", "to-hf", tmp_path / "runs" / "books", tmp_path / "hf")
    text = [f"data.validation=[{data / 'validation'}]", "evaluation.final_max_tokens=512", "data.sequence_length=128"]
    found = json.loads(invoke("evaluate", tmp_path / "hf", *text, "--json").splitlines()[-1])
    assert found["val_loss"] == pytest.approx(trained["val_loss"], rel=1e-5)
    assert found["memory_off_loss"] == pytest.approx(trained["memory_off_loss"], rel=1e-5)

    changed = write_config(tmp_path / "changed.yaml", {**tree, "training": {**tree["training"], "freeze": None}})
    model = yaml.safe_load((start / "model.yaml").read_text())["model"]
    assert model["mixer"]["output_init"] == "zero"
    assert "training.freeze was base and is None" in refused(
        "start-from", start, changed, "name=books", "training.steps=5", "--processes", "1"
    )
