"""The library: `import megamem` and what its functions give."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megamem
from megamem.config.model import MIXERS
from megamem.errors import ConfigError
from megamem.memory.base import Chunk
from megamem.model.stage import Stage
from tests.contract.case import CHUNK
from tests.contract.cases import ALL_CASES

ROOT = Path(__file__).resolve().parents[2]
BOOKS = ROOT / "configs" / "recipes" / "books.yaml"
SMALL = ["model.layers=2", "model.memory=[]", "model.hidden_size=24", "model.heads=2", "model.vocab_size=64"]


def test_importing_it_loads_nothing_heavy():
    code = (
        "import sys, megamem; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'pydantic', 'yaml', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_name_is_there_and_others_are_not():
    assert set(megamem.__all__) <= set(dir(megamem))
    assert all(callable(getattr(megamem, name)) for name in megamem.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = megamem.trian


@pytest.mark.parametrize("path", [BOOKS, str(BOOKS)], ids=["Path", "str"])
def test_a_model_has_weights_that_the_seed_gives(path):
    config = megamem.load_config(path, SMALL)
    model = megamem.build_model(config)
    assert isinstance(model, Stage)
    assert all(parameter.isfinite().all() and parameter.abs().sum() > 0 for parameter in model.parameters())
    same, other = megamem.build_model(config, seed=config.training.seed), megamem.build_model(config, seed=7)
    assert torch.equal(model.embedding.weight, same.embedding.weight)
    assert not torch.equal(model.embedding.weight, other.embedding.weight)
    assert megamem.build_model(config.model, dtype=torch.bfloat16).embedding.weight.dtype == torch.bfloat16


STANDING_ALONE = {case.kind for case in ALL_CASES}
"""All mechanisms but those that work on side rows alone (see `test_lamemo.py` for how these are refused)."""


def test_those_that_do_not_stand_alone_are_known():
    assert set(MIXERS.kinds()) - STANDING_ALONE == {"lamemo"}


@pytest.mark.parametrize("kind", sorted(STANDING_ALONE))
def test_every_mechanism_stands_alone(kind):
    """The first case of each: calls of any length give what one call gives, and row 1 can begin a new document."""
    case = next(case for case in ALL_CASES if case.kind == kind)
    sizes = {"hidden_size": 16, "heads": 4, "kv_heads": 4 // case.queries_per_key, "chunk_size": CHUNK}
    layer = megamem.mixer(kind, **sizes, dtype=torch.float64, **case.options)
    x = torch.randn(2, 3 * CHUNK, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, state = layer(x)
    first, partly = layer(x[:, :5])
    rest, again = layer(x[:, 5:], partly)
    # float64, the same sums in another order, as for the law of streaming
    assert (torch.cat((first, rest), 1) - whole).abs().max() < 1e-12
    assert state.positions == again.positions == (3 * CHUNK, 3 * CHUNK)
    after, _ = layer(x[:, :CHUNK], state.with_new_documents([False, True]))
    assert (after[1] - whole[1, :CHUNK]).abs().max() < 1e-12
    assert not any(t.requires_grad for t in _tensors(state.detach().tensors))


def _tensors(value):
    from megamem.memory.base import state_tensors

    return state_tensors(value)


def test_what_is_wrong_is_named():
    with pytest.raises(ConfigError, match="did you mean 'titans'"):
        megamem.mixer("titan", hidden_size=16, heads=4, chunk_size=8)
    with pytest.raises(ConfigError, match="inner_chunk 3 does not divide"):
        megamem.mixer("titans", hidden_size=16, heads=4, chunk_size=8, inner_chunk=3)
    layer = megamem.mixer("retnet", hidden_size=16, heads=4, chunk_size=8)
    _, state = layer(torch.randn(2, 8, 16))
    with pytest.raises(ValueError, match="3 rows cannot continue a state of 2"):
        layer(torch.randn(3, 8, 16), state)


def test_plan():
    report = megamem.plan(BOOKS, devices=2, device="cpu")
    assert report.devices == 2
    assert report.days > 0


def test_an_evaluator_reads_with_a_model_in_hand():
    """Of the chunk that it has read in pieces the logits are those of `read_chunk`."""
    config = megamem.load_config(BOOKS, SMALL)
    model = megamem.build_model(config, dtype=torch.float64)
    evaluator = megamem.evaluator(model, rows=2)
    tokens = torch.randint(64, (config.model.chunk_size, 2), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model.initial_states(2, torch.device("cpu"), torch.float64)
        hidden, _, _ = model.read_chunk(tokens, states, Chunk((0, 0)))
        logits = model.logits(hidden).float()
    assert torch.equal(evaluator.logits(tokens), logits)
    best = logits[-1].argmax(-1).tolist()
    assert evaluator.generate(tokens.T.tolist(), 1) == [[token] for token in best]
    scores = evaluator.score([[*row, token] for row, token in zip(tokens.T.tolist(), best, strict=True)], [1, 1])
    expected = logits[-1].log_softmax(-1).max(-1).values
    # float32: the sums of a softmax over 64 tokens
    assert [nats for nats, _ in scores] == pytest.approx(expected.tolist(), rel=1e-6)
    assert [likeliest for _, likeliest in scores] == [True, True]
