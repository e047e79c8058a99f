"""muP: what follows the width and how, that nothing does at the base width, and the coordinate check."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.coordinate_check import GROWTH, MECHANISMS, main, measured, model_of, slopes
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.optimizer import OptimizerConfig
from megamem.errors import ConfigError
from megamem.hf import MegamemConfig
from megamem.hf.export import llama_config
from megamem.hf.names import LLAMA, is_llama, renamed
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage, meta_stage
from megamem.parallel.linears import PlainLinears, info, initialize_parameters
from megamem.pipeline.optimizer import parameter_groups
from tests.contract.cases import ALL_CASES, CASES

BASE = {"base_width": 64, "base_heads": 4}
WIDTHS = (64, 128, 256)
# Of an update, what does not point along the activations adds up as 1 / sqrt(width) in muP. It is still to be seen at
# these widths (slopes from -0.14 to 0.18) and vanishes at larger ones; without muP everything grows (0.74 and more).
LEVEL, GROWS = 0.25, 0.6


def built(model, seed=0):
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed)
    return stage


def logits(stage, tokens):
    states = stage.initial_states(tokens.shape[1], torch.device("cpu"), torch.float32)
    with torch.no_grad():
        hidden, _, _ = stage(tokens, states, Chunk((0,) * tokens.shape[1]))
        return stage.logits(hidden)


def tokens_of(model):
    return torch.randint(model.vocab_size, (model.chunk_size, 2), generator=torch.Generator().manual_seed(0))


def changes(name, growth, mup, **more):
    """Slopes over the width of what five steps change."""
    _, found = measured(MECHANISMS[name], growth, mup, WIDTHS, steps=5, lr=2e-3, **more)
    return slopes(WIDTHS, found)


class TestCoordinateCheck:
    @pytest.mark.parametrize(
        ("name", "growth"),
        [
            *((name, growth) for name in ("attention", "elastic", "ssd") for growth in GROWTH),
            ("titans", "wider heads"),
            ("caching", "more heads"),
        ],
    )
    def test_what_is_learned_does_not_depend_on_the_width(self, name, growth):
        found = changes(name, growth, mup=True)
        assert {place for place, value in found.items() if abs(value) > LEVEL} == set(), found

    @pytest.mark.parametrize(("name", "growth"), [("attention", "wider heads"), ("ssd", "more heads")])
    def test_it_does_in_the_standard_parametrization(self, name, growth):
        found = changes(name, growth, mup=False)
        assert {place for place, value in found.items() if value < GROWS} == set(), found

    def test_keys_that_several_queries_share(self):
        found = changes("attention", "wider heads", mup=True, kv_heads=2)
        assert {place for place, value in found.items() if abs(value) > LEVEL} == set(), found
        assert "scores 1" in found

    def test_tied_embeddings(self):
        found = changes("attention", "more heads", mup=True, tie_embeddings=True)
        assert abs(found["logits"]) <= LEVEL, found


class TestBaseWidth:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
    def test_a_model_of_the_bases_shape_is_the_standard_one(self, case):
        standard = case.model(layers=2)
        size = {"base_width": standard.hidden_size, "base_heads": standard.heads}
        model = ModelConfig.model_validate({**standard.model_dump(), "mup": size})
        plain, scaled = built(standard), built(model)
        for (name, one), other in zip(plain.named_parameters(), scaled.parameters(), strict=True):
            assert torch.equal(one, other), name
        config = OptimizerConfig()
        groups = [parameter_groups(stage.named_parameters(), config) for stage in (plain, scaled)]
        settings = [[(g["weight_decay"], g["lr_scale"], len(g["params"])) for g in made] for made in groups]
        assert settings[0] == settings[1]
        assert len(settings[0]) == 2
        assert torch.equal(logits(plain, tokens_of(model)), logits(scaled, tokens_of(model)))

    def test_its_shape(self):
        def base(**fields):
            return ModelConfig.model_validate({"layers": 1, "vocab_size": 32, "chunk_size": 8, **fields}).base

        grouped = {"hidden_size": 256, "heads": 16, "kv_heads": 4, "ffn_size": 512}
        more = base(**grouped, mup={"base_width": 64})
        assert (more.heads, more.resolved_kv_heads, more.resolved_head_dim, more.resolved_ffn_size, more.mup) == (
            4,
            1,
            16,
            128,
            None,
        )
        wider = base(**grouped, mup={"base_width": 64, "base_heads": 16, "base_ffn_size": 256})
        assert (wider.heads, wider.resolved_kv_heads, wider.resolved_head_dim, wider.resolved_ffn_size) == (
            16,
            4,
            4,
            256,
        )
        shared = base(**grouped, mup={"base_width": 64, "base_kv_heads": 4})
        assert (shared.heads, shared.resolved_kv_heads, shared.resolved_head_dim) == (4, 4, 16)
        by_rule = base(hidden_size=512, heads=8, mup={"base_width": 128})
        assert (by_rule.heads, by_rule.resolved_ffn_size) == (2, 384)
        assert base(hidden_size=512, heads=8).hidden_size == 512

    @pytest.mark.parametrize(
        ("mup", "message"),
        [
            ({"base_width": 100}, "mup: base_width 100 gives no base model: heads would be 1.5625"),
            ({"base_width": 64, "base_heads": 3}, "head_dim would be 21.3333"),
            ({"base_width": 64, "base_heads": 64}, "head_dim 1 is odd"),
            ({"base_width": 64, "base_heads": 2, "base_kv_heads": 4}, "heads 2 is not a multiple of kv_heads 4"),
        ],
    )
    def test_one_that_is_no_model_is_refused_in_a_line(self, mup, message):
        tree = {"layers": 1, "hidden_size": 256, "heads": 4, "vocab_size": 32, "chunk_size": 8, "mup": mup}
        with pytest.raises(ConfigError) as caught:
            parse_config(ModelConfig, tree, "model.yaml")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


class TestRules:
    def declared(self, growth, name="titans", width=256):
        return {n: info(p) for n, p in meta_stage(model_of(MECHANISMS[name], width, growth, True)).named_parameters()}

    def test_learning_rates(self):
        wider, more = (self.declared(growth) for growth in ("wider heads", "more heads"))
        for found in (wider, more):
            assert found["embedding.weight"].lr_scale == found["norm.weight"].lr_scale == 1
            assert found["layers.0.mixer.convolutions.key.weight"].lr_scale == 1
            assert found["layers.0.mixer.token_gates.rate.start"].lr_scale == 1
            for name in ("mixer.query", "mixer.output", "mlp.down", "mixer.token_gates.rate.weight"):
                assert found[f"layers.1.{name}.weight"].lr_scale == 1 / 4, name
            assert found["head.weight"].lr_scale == 1 / 4
        # a memory's own weights are as wide as a head
        assert wider["layers.0.mixer.start.up"].lr_scale == 1 / 4
        assert more["layers.0.mixer.start.up"].lr_scale == 1

    @pytest.mark.parametrize("growth", GROWTH)
    def test_start_values(self, growth):
        model = model_of(MECHANISMS["titans"], 256, growth, True)
        values = dict(built(model).named_parameters())
        few = 1 / 4 if growth == "wider heads" else 1 / 2  # gates: as many as heads
        expected = {
            "embedding.weight": 1, "head.weight": 1 / 4, "layers.0.mixer.query.weight": 1 / 2,
            "layers.0.mixer.token_gates.rate.weight.weight": few, "layers.0.mlp.up.weight": 1 / 2,
            "layers.0.mlp.down.weight": 1 / 2 / 4**0.5, "layers.1.mixer.output.weight": 1 / 2 / 4**0.5,
        }  # fmt: skip
        for name, factor in expected.items():
            spread = 4 / (2 * values[name].numel()) ** 0.5  # four standard deviations of a standard deviation
            assert values[name].std().item() == pytest.approx(model.init_std * factor, rel=spread), name
        up = values["layers.0.mixer.start.up"]
        assert up.std().item() == pytest.approx(up.shape[-1] ** -0.5, rel=4 / (2 * up.numel()) ** 0.5)
        assert values["norm.weight"].unique().tolist() == [1.0]

    @pytest.mark.parametrize("growth", GROWTH)
    @pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)
    def test_every_weight_that_grows_on_two_sides_says_what_it_sums_over(self, case, growth):
        """Without `declare(..., fan_in=axis)` its learning rate would not follow the width."""
        heads, head_dim = (8, 4) if growth == "more heads" else (4, 8)
        wide, narrow = (meta_stage(case.model(layers=1, heads=h, head_dim=d)) for h, d in ((heads, head_dim), (4, 4)))
        for (name, parameter), base in zip(wide.named_parameters(), narrow.parameters(), strict=True):
            growing = [
                axis for axis, sizes in enumerate(zip(parameter.shape, base.shape, strict=True)) if len({*sizes}) > 1
            ]
            assert len(growing) < 2 or info(parameter).fan_in in growing, name

    @pytest.mark.parametrize(
        ("memory", "router", "scale"),
        [("titans", "own", 1 / 2), ("titans", "query", 1), ("retnet", "own", 1 / 4), ("retnet", "query", 1 / 4)],
    )
    def test_scores_of_kept_memories_follow_the_width_of_heads(self, memory, router, scale):
        """Each of a query and a key that is no unit vector makes a score grow; how RetNet divides is undone."""
        options = {
            "kind": "memory_caching",
            "memory": {"kind": memory, "inner_chunk": 8},
            "segment": 8,
            "router": router,
        }
        mixer = meta_stage(model_of(options, 256, "wider heads", True)).own_layers[0].mixer
        undone = 1.0 if router == "own" else mixer.memory.query_scale
        assert mixer.score_scale * undone == pytest.approx(scale, rel=1e-12)

    def test_a_part_of_the_model_has_the_declarations_of_the_whole(self):
        model = model_of(MECHANISMS["titans"], 256, "wider heads", True, layers=4, tie_embeddings=True)
        whole = dict(meta_stage(model).named_parameters())
        for layers in (range(2), range(2, 4)):
            for name, parameter in build_stage(model, PlainLinears(), layers).named_parameters():
                assert info(parameter).lr_scale == info(whole[name]).lr_scale, name

    def test_rate_times_decay_does_not_depend_on_the_width(self):
        model = model_of(MECHANISMS["attention"], 256, "more heads", True)
        groups = parameter_groups(meta_stage(model).named_parameters(), OptimizerConfig(weight_decay=0.1))
        assert [(g["weight_decay"], g["lr_scale"]) for g in groups] == [(0.4, 0.25), (0.1, 1.0), (0.0, 1.0)]

    def test_a_stage_has_as_many_groups_as_the_whole_model(self):
        model = model_of(MECHANISMS["attention"], 256, "more heads", True, layers=3)
        middle = build_stage(model, PlainLinears(), range(1, 2))
        alone = parameter_groups(middle.named_parameters(), OptimizerConfig())
        groups = parameter_groups(middle.named_parameters(), OptimizerConfig(), least=3)
        assert (len(alone), len(groups)) == (2, 3)
        settings = {id(p): (g["weight_decay"], g["lr_scale"]) for g in groups for p in g["params"]}
        assert settings == {id(p): (g["weight_decay"], g["lr_scale"]) for g in alone for p in g["params"]}
        assert all(group["params"] for group in groups)


class TestExport:
    def exported(self, model, folder):
        """Through the files of our own architecture."""
        stage = built(model)
        made = AutoModelForCausalLM.from_config(MegamemConfig(megamem=model.model_dump(mode="json")))
        made.model.load_state_dict(stage.state_dict())
        made.save_pretrained(folder)
        return stage, AutoModelForCausalLM.from_pretrained(folder).eval()

    def test_logits_of_a_tied_model_with_wider_heads(self, tmp_path):
        model = model_of(MECHANISMS["attention"], 128, "wider heads", True, tie_embeddings=True, init_std=0.3)
        stage, exported = self.exported(model, tmp_path)
        tokens = tokens_of(model)
        expected = logits(stage, tokens)
        with torch.no_grad():
            assert torch.equal(exported(tokens.T).logits.transpose(0, 1), expected)
        standard = built(model.model_copy(update={"mup": None}))
        standard.load_state_dict(stage.state_dict())
        # half of the base's scores and logits, so scaling is a part of the model and not of its weights
        assert (logits(standard, tokens) / 2 - expected).abs().max() > 1e-2

    @pytest.mark.parametrize(
        ("growth", "tied", "native"),
        [("more heads", False, True), ("more heads", True, False), ("wider heads", False, False)],
    )
    def test_what_transformers_own_llama_can_be(self, growth, tied, native):
        assert is_llama(model_of(MECHANISMS["attention"], 128, growth, True, tie_embeddings=tied)) == native
        assert is_llama(model_of(MECHANISMS["attention"], 64, growth, True, tie_embeddings=tied))

    def test_llama_computes_the_same(self):
        model = model_of(MECHANISMS["attention"], 128, "more heads", True, init_std=0.3)
        stage = built(model)
        llama = LlamaForCausalLM(llama_config(model, 64)).eval()
        llama.load_state_dict({renamed(name, LLAMA): value for name, value in stage.state_dict().items()})
        tokens = tokens_of(model)
        with torch.no_grad():
            found = llama(tokens.T).logits.transpose(0, 1)
        expected = logits(stage, tokens)
        # FP32, other kernels
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_command_draws_and_records(tmp_path, capsys):
    output = tmp_path / "check.json"
    options = ["--widths", "64", "128", "--mechanisms", "attention", "--drawn", "attention", "--steps", "2"]
    main([*options, "--output", str(output)])
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert record == json.loads(output.read_text())
    assert set(record["slopes"]) == {f"attention, {growth}" for growth in GROWTH}
    assert output.with_suffix(".png").stat().st_size > 10_000
