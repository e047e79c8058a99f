"""What leaves a run for transformers is the model that was trained: every mechanism, from every layout."""

import pytest
import torch

from checkpoints.folder import at, folder_name
from checkpoints.read import weights
from megamem.hf.export import to_hf
from megamem.hf.importing import from_hf
from tests.contract.driver import within
from tests.contract.export import CHUNK, LAYOUTS, NEW_TOKENS, PROMPT, tokens, world
from tests.distributed.harness import PARALLEL, run_distributed

pytestmark = pytest.mark.distributed

# FP32: whole products against partial sums of two ranks
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(folder of the checkpoints, results by `case/layout`)"""
    folder = tmp_path_factory.mktemp("export")
    found = {}
    for size in sorted({size for size, _ in LAYOUTS.values()}):
        layouts = {name: parallel for name, (world_size, parallel) in LAYOUTS.items() if world_size == size}
        payload = {"folder": str(folder), "layouts": layouts}
        results = run_distributed(size, f"{world.__module__}:world", payload, preload=PARALLEL)
        for key in results[0]:
            assert all(result[key]["made"] == results[0][key]["made"] for result in results), "all ranks agree"
            logits = next(result[key]["logits"] for result in results if result[key]["logits"] is not None)
            found[key] = {"logits": logits, "made": results[0][key]["made"]}
    return folder, found


@pytest.fixture(scope="module")
def exported(ranks, tmp_path_factory):
    """case id, layout -> (checkpoint, folder, facts, model); each is made once."""
    from transformers import AutoModelForCausalLM

    folder, made = tmp_path_factory.mktemp("hf"), {}

    def get(case, layout):
        name = f"{case.id}-{layout}"
        if name not in made:
            checkpoint = at(ranks[0] / name / folder_name(0))
            facts = to_hf(checkpoint, folder / name, native=False)
            model = AutoModelForCausalLM.from_pretrained(folder / name).eval()
            made[name] = checkpoint, folder / name, facts, model
        return made[name]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
class TestExport:
    def test_logits_are_those_of_the_training_model(self, ranks, exported, case, layout):
        _, _, facts, model = exported(case, layout)
        expected = ranks[1][f"{case.id}/{layout}"]["logits"]
        with torch.no_grad():
            found = model(tokens(model.config.vocab_size).T).logits[0]
        within("export: logits", (found - expected).abs().max().item() / expected.abs().max().item(), TOLERANCE)
        within("export: parity on file", facts["parity"]["max_diff"] / facts["parity"]["max_logit"], TOLERANCE)

    def test_greedy_continuation_is_the_same(self, ranks, exported, case, layout):
        _, _, _, model = exported(case, layout)
        prompt = tokens(model.config.vocab_size)[:PROMPT].T
        found = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert found[0, PROMPT:].tolist() == ranks[1][f"{case.id}/{layout}"]["made"]

    def test_weights_come_back_bit_for_bit(self, exported, case, layout, tmp_path):
        from safetensors.torch import load_file

        checkpoint, folder, _, _ = exported(case, layout)
        from_hf(folder, tmp_path / "back")
        back, original = load_file(tmp_path / "back" / "weights.safetensors"), dict(weights(checkpoint))
        assert back.keys() == original.keys()
        assert max((back[name] - original[name]).abs().max().item() for name in back) == 0


def test_token_by_token_is_in_one_go(exported, case):
    _, _, _, model = exported(case, "tp1")
    ids = tokens(model.config.vocab_size).T
    with torch.no_grad():
        whole, cache, steps = model(ids).logits, None, []
        for step in ids.split(1, 1):
            output = model(step, past_key_values=cache)
            cache = output.past_key_values
            steps.append(output.logits)
    error = (torch.cat(steps, 1) - whole).abs().max() / whole.abs().max()
    within("export: token by token", error.item(), TOLERANCE)
    assert cache.get_seq_length() == ids.shape[1]


def test_bfloat16(ranks, exported, case, tmp_path):
    """Against the training model in BF16; and near the FP32 one."""
    facts = to_hf(at(ranks[0] / f"{case.id}-tp2" / folder_name(0)), tmp_path / "bf16", dtype="bf16", native=False)
    within("export: BF16", facts["parity"]["max_diff"] / facts["parity"]["max_logit"], 1e-2)
    assert facts["parity"]["tokens"] == 4 * CHUNK
    assert facts["dtype"] == "bf16"
