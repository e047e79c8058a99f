"""What leaves a run for transformers is the model that was trained: every mechanism, from every layout."""

import copy
import itertools

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.folder import folder_name, open_checkpoint
from checkpoints.read import read_weights
from megamem.hf.export import to_hf
from megamem.hf.importing import from_hf
from tests.contract.cases import PATIENCE_S
from tests.contract.driver import within
from tests.contract.export import CHUNK, EXPORTED, KINDS, LAYOUTS, NEW_TOKENS, PROMPT, tokens, world
from tests.distributed.harness import run_distributed

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(PATIENCE_S + 120)]

# FP32: whole products against partial sums of two ranks
TOLERANCE = 1e-5
# float64: sums in another order
EXACT = 1e-12


def every(layouts):
    """Parameters `model, layout`; all but the first case of each mechanism are slow."""
    return pytest.mark.parametrize(
        ("model", "layout"),
        [
            pytest.param(
                case, layout, marks=[] if case in KINDS.values() else pytest.mark.slow, id=f"{case.id}-{layout}"
            )
            for case in EXPORTED
            for layout in layouts
        ],
    )


class Exports:
    """Checkpoints, exports and what the training models computed; each is made once."""

    def __init__(self, folder):
        self.folder, self.found, self.models = folder, {}, {}

    def trained(self, case, layout):
        """(checkpoint, {logits, made}) of the model under a layout."""
        if (case.id, layout) not in self.found:
            self._run(case in KINDS.values(), LAYOUTS[layout][0])
        return self.found[case.id, layout]

    def _run(self, first, size):
        """All cases that are the first of their mechanism, or all others, under all layouts of a world."""
        cases = [case for case in EXPORTED if (case in KINDS.values()) == first]
        layouts = {name: parallel for name, (world_size, parallel) in LAYOUTS.items() if world_size == size}
        payload = {"folder": str(self.folder), "layouts": layouts, "cases": [case.id for case in cases]}
        results = run_distributed(size, f"{world.__module__}:world", payload, timeout_s=PATIENCE_S)
        for case, layout in itertools.product(cases, layouts):
            parts = [result[f"{case.id}/{layout}"] for result in results]
            assert all(part["made"] == parts[0]["made"] for part in parts), "all ranks agree"
            logits = next(part["logits"] for part in parts if part["logits"] is not None)
            checkpoint = open_checkpoint(self.folder / f"{case.id}-{layout}" / folder_name(0))
            self.found[case.id, layout] = checkpoint, {"logits": logits, "made": parts[0]["made"]}

    def exported(self, case, layout):
        """(folder, facts, model)"""
        from transformers import AutoModelForCausalLM

        if (case.id, layout) not in self.models:
            folder = self.folder / "hf" / f"{case.id}-{layout}"
            facts = to_hf(self.trained(case, layout)[0], folder, native=False)
            self.models[case.id, layout] = folder, facts, AutoModelForCausalLM.from_pretrained(folder).eval()
        return self.models[case.id, layout]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return Exports(tmp_path_factory.mktemp("export"))


@every(LAYOUTS)
class TestExport:
    def test_logits_are_those_of_the_training_model(self, exports, model, layout):
        _, facts, exported = exports.exported(model, layout)
        expected = exports.trained(model, layout)[1]["logits"]
        with torch.no_grad():
            found = exported(tokens(exported.config.vocab_size).T).logits[0]
        within("export: logits", (found - expected).abs().max().item() / expected.abs().max().item(), TOLERANCE)
        within("export: parity on file", facts["parity"]["max_diff"] / facts["parity"]["max_logit"], TOLERANCE)

    def test_greedy_continuation_is_the_same(self, exports, model, layout):
        _, _, exported = exports.exported(model, layout)
        prompt = tokens(exported.config.vocab_size)[:PROMPT].T
        found = exported.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert found[0, PROMPT:].tolist() == exports.trained(model, layout)[1]["made"]

    def test_weights_come_back_bit_for_bit(self, exports, model, layout, tmp_path):
        folder, _, _ = exports.exported(model, layout)
        from_hf(folder, tmp_path / "back")
        back = load_file(tmp_path / "back" / "weights.safetensors")
        original = dict(read_weights(exports.trained(model, layout)[0]))
        assert back.keys() == original.keys()
        assert max((back[name] - original[name]).abs().max().item() for name in back) == 0


@every(["tp1"])
def test_token_by_token_is_in_one_go(exports, model, layout):
    """In float64, where a difference is none of rounding: what is read is normalized, however small it is."""
    _, _, exported = exports.exported(model, layout)
    exact = copy.deepcopy(exported).double()
    ids = tokens(exact.config.vocab_size).T
    with torch.no_grad():
        whole, cache, steps = exact(ids).logits, None, []
        for step in ids.split(1, 1):
            output = exact(step, past_key_values=cache)
            cache = output.past_key_values
            steps.append(output.logits)
    assert whole.dtype == torch.float64
    error = (torch.cat(steps, 1) - whole).abs().max() / whole.abs().max()
    within("export: token by token", error.item(), EXACT)
    assert cache.get_seq_length() == ids.shape[1]


@every(["tp2"])
def test_bfloat16(exports, model, layout, tmp_path):
    """Against the training model in BF16."""
    facts = to_hf(exports.trained(model, layout)[0], tmp_path / "bf16", dtype="bf16", native=False)
    within("export: BF16", facts["parity"]["max_diff"] / facts["parity"]["max_logit"], 1e-2)
    assert facts["parity"]["tokens"] == 4 * CHUNK
    assert facts["dtype"] == "bf16"
