"""Exported models behind transformers' interface: padding, beams, caches, dtypes, what is refused."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from megamem.config.model import ModelConfig
from megamem.errors import ConfigError, DependencyError
from megamem.hf import MegamemCache, MegamemConfig
from megamem.hf.cache import padding_of
from megamem.hf.export import llama_config
from megamem.hf.names import LLAMA, is_llama, renamed
from megamem.hf.version import check_transformers

CHUNK, VOCABULARY = 8, 32
MODEL = {
    "layers": 3,
    "hidden_size": 16,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": VOCABULARY,
    "chunk_size": CHUNK,
    "init_std": 0.3,
    "memory": [
        {"layers": [1], "mixer": {"kind": "elastic_memory", "order": 6, "samples": 5}},
        {"layers": [2], "mixer": {"kind": "full_attention"}},
    ],
}


def make(**changes):
    torch.manual_seed(0)
    section = ModelConfig.model_validate({**MODEL, **changes}).model_dump(mode="json")
    return AutoModelForCausalLM.from_config(MegamemConfig(megamem=section)).eval()


@pytest.fixture(scope="module")
def model():
    return make()


def ids(rows=2, tokens=20, seed=0):
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def logits(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs).logits


class TestPadding:
    @pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}], ids=["whole", "prefill in parts"])
    def test_rows_padded_on_the_left_continue_as_alone(self, model, options):
        prompts = [ids(1, n, seed=n) for n in (3, 11, 20)]
        padded = torch.cat([torch.cat((torch.full((1, 20 - p.shape[1]), 7), p), 1) for p in prompts])
        mask = torch.tensor([[int(i >= 20 - p.shape[1]) for i in range(20)] for p in prompts])
        together = model.generate(padded, attention_mask=mask, max_new_tokens=25, do_sample=False, **options)
        for row, prompt in enumerate(prompts):
            alone = model.generate(prompt, max_new_tokens=25, do_sample=False)
            assert together[row, 20:].tolist() == alone[0, prompt.shape[1] :].tolist()

    def test_padding_tokens_may_be_anything(self, model):
        mask = torch.tensor([[0, 0, 1, 1, 1]])
        some = logits(model, torch.tensor([[1, 2, 3, 4, 5]]), attention_mask=mask)
        other = logits(model, torch.tensor([[VOCABULARY + 9, 0, 3, 4, 5]]), attention_mask=mask)
        assert torch.equal(some[:, 2:], other[:, 2:])

    def test_rows_padded_on_the_right_are_scored(self, model):
        """As lm-eval does it, with or without a mask."""
        whole = ids(2, 20)
        mask = torch.ones(2, 20, dtype=torch.int64)
        mask[1, 13:] = 0
        alone = logits(model, whole[1:, :13])
        for given in ({}, {"attention_mask": mask}):
            together = logits(model, whole, **given)
            torch.testing.assert_close(together[1:, :13], alone, rtol=1e-4, atol=1e-5)

    def test_nothing_follows_rows_padded_on_the_right(self, model):
        mask = torch.tensor([[1, 1, 0]])
        cache = model(ids(1, 3), attention_mask=mask).past_key_values
        with pytest.raises(ValueError, match="padded on the right: nothing can follow"):
            model(ids(1, 1), past_key_values=cache)
        with pytest.raises(ValueError, match="generation needs padding on the left"):
            model.generate(ids(1, 3), attention_mask=mask, max_new_tokens=2)

    def test_a_mask_says_where_rows_begin(self):
        assert padding_of([[1, 1, 1], [0, 0, 1]]) == ((0, 2), False)
        assert padding_of([[1, 1, 0], [0, 1, 1]]) == ((0, 1), True)
        with pytest.raises(ValueError, match="row 1 has a hole"):
            padding_of([[1, 1, 1], [1, 0, 1]])
        with pytest.raises(ValueError, match="row 0 has no token"):
            padding_of([[0, 0, 0]])


class TestGeneration:
    @pytest.mark.parametrize("beams", [1, 3])
    def test_with_and_without_a_cache(self, model, beams):
        settings = {"max_new_tokens": 20, "num_beams": beams, "do_sample": False}
        assert model.generate(ids(), **settings).tolist() == model.generate(ids(), use_cache=False, **settings).tolist()

    def test_sampling_follows_torch(self, model):
        def sample():
            torch.manual_seed(5)
            return model.generate(ids(), max_new_tokens=20, do_sample=True, num_return_sequences=2).tolist()

        first = sample()
        assert len(first) == 4
        assert first == sample()
        assert first[0] != first[1]

    def test_a_conversation_goes_on_from_its_cache(self, model):
        whole = ids(1, 30)
        cache = MegamemCache()
        first = model.generate(whole[:, :10], past_key_values=cache, max_new_tokens=4, do_sample=False)
        longer = torch.cat((first, whole[:, 10:]), 1)
        again = model.generate(longer, past_key_values=cache, max_new_tokens=8, do_sample=False)
        assert again.tolist() == model.generate(longer, max_new_tokens=8, do_sample=False).tolist()

    def test_what_cannot_follow_is_refused(self, model):
        cache = MegamemCache()
        logits(model, ids(2, 12), past_key_values=cache)
        mask = torch.ones(2, 16, dtype=torch.int64)
        mask[0, 12:14] = 0
        with pytest.raises(ValueError, match="padding between what was read and what follows"):
            model(ids(2, 4), attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="3 rows cannot continue a cache of 2"):
            model(ids(3, 4), past_key_values=cache)
        with pytest.raises(ValueError, match=f"token id {VOCABULARY} is not in the vocabulary"):
            model(torch.full((2, 4), VOCABULARY), past_key_values=cache)
        assert cache.seen == 12, "nothing of it was read"

    @pytest.mark.parametrize("keep", [1, 7, 8, 9, 20])
    def test_logits_of_the_last_tokens_across_chunks(self, model, keep):
        whole = logits(model, ids())
        kept = logits(model, ids(), logits_to_keep=keep)
        # a product of fewer rows may add up in another order
        torch.testing.assert_close(kept, whole[:, -keep:], rtol=1e-5, atol=1e-6)

    def test_the_state_of_a_bounded_memory_does_not_grow(self):
        model = make(memory=MODEL["memory"][:1])
        sizes = set()
        cache = None
        for step in range(12 * CHUNK):
            cache = model(ids(1, 1, step), past_key_values=cache).past_key_values
            if step % CHUNK == CHUNK - 1:
                sizes.add(cache.bytes)
        assert len(sizes) == 1

    def test_what_has_no_meaning_is_refused(self, model):
        with pytest.raises(ValueError, match="a DynamicCache; megamem models need a MegamemCache"):
            model(ids(), past_key_values=DynamicCache())
        with pytest.raises(ValueError, match="cache_implementation 'static': a memory state has one form"):
            model.generate(ids(), cache_implementation="static", max_new_tokens=2)
        with pytest.raises(ValueError, match="inputs_embeds is not supported"):
            model(inputs_embeds=torch.zeros(1, 2, 16))
        with pytest.raises(ValueError, match="cannot be cut back by tokens"):
            MegamemCache().crop(1)
        with pytest.raises(ValueError, match="stateful models"):
            model.generate(ids(1), assistant_model=model, max_new_tokens=2)

    @pytest.mark.parametrize("wrong", [-1, VOCABULARY])
    def test_unknown_tokens(self, model, wrong):
        with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary of {VOCABULARY}"):
            model.generate(torch.tensor([[1, wrong]]), max_new_tokens=2)


def test_rows_of_a_cache_can_be_chosen_and_repeated(model):
    with torch.no_grad():
        cache = model(ids(3, 20)).past_key_values
    chosen, repeated = copy.deepcopy(cache), copy.deepcopy(cache)
    chosen.batch_select_indices(torch.tensor([2, 0]))
    repeated.batch_repeat_interleave(2)
    assert (cache.batch_size, chosen.batch_size, repeated.batch_size) == (3, 2, 6)
    step = ids(3, 1, seed=1)
    expected = logits(model, step, past_key_values=cache)
    torch.testing.assert_close(logits(model, step[[2, 0]], past_key_values=chosen), expected[[2, 0]])
    found = logits(model, step.repeat_interleave(2, 0), past_key_values=repeated)
    torch.testing.assert_close(found, expected.repeat_interleave(2, 0))


class TestFiles:
    def test_saved_and_loaded(self, model, tmp_path):
        model.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).megamem == model.config.megamem
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(logits(again, ids()), logits(model, ids()))

    def test_tied_embeddings_are_saved_once(self, tmp_path):
        model = make(tie_embeddings=True)
        model.save_pretrained(tmp_path)
        assert model.get_output_embeddings() is model.get_input_embeddings()
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert again.config.tie_word_embeddings
        assert torch.equal(logits(again, ids()), logits(model, ids()))

    def test_layers_that_share_biases(self, tmp_path):
        model = make(mixer={"kind": "transformer_xl", "shared_biases": True}, memory=[])
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert sum("biases" in name for name in again.state_dict()) == 2
        assert torch.equal(logits(again, ids()), logits(model, ids()))

    @pytest.mark.parametrize("tied", [False, True])
    def test_words_in_clusters(self, tied, tmp_path):
        """Adaptive input and softmax: saved once, read back, and generated with."""
        adaptive = {"cutoffs": [6, 13, 21], "divisor": 2, "tie_projections": tied}
        model = make(tie_embeddings=tied, adaptive=adaptive)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(logits(again, ids()), logits(model, ids()))
        assert logits(model, ids()).exp().sum(-1).allclose(torch.ones(2, 20), atol=1e-5)
        made = again.generate(ids(1, 5), max_new_tokens=6, do_sample=False)
        for position in range(5, 11):
            assert logits(model, made[:, :position])[0, -1].argmax() == made[0, position]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu"}])
    def test_dtypes_and_devices(self, model, tmp_path, dtype, device_map):
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map=device_map)
        assert {p.dtype for p in again.parameters()} == {dtype}
        error, scale = (logits(again, ids()) - logits(model, ids())).abs(), logits(model, ids()).abs().max()
        assert error.mean() <= (1e-2 if dtype == torch.bfloat16 else 0) * scale

    def test_new_weights_are_drawn_as_in_training(self, model):
        """Norms start from one, projections into the residual stream smaller than others."""
        parameters = dict(model.model.named_parameters())
        assert parameters["layers.1.mixer_norm.weight"].unique().tolist() == [1.0]
        ratio = parameters["layers.0.mlp.up.weight"].std() / parameters["layers.0.mlp.down.weight"].std()
        assert ratio.item() == pytest.approx((2 * MODEL["layers"]) ** 0.5, rel=0.15)

    def test_an_unknown_mechanism(self):
        section = {**MODEL, "mixer": "telepathy"}
        with pytest.raises(ConfigError, match=r"config\.json: megamem: mixer.*telepathy"):
            MegamemConfig(megamem=section)


class TestTraining:
    def test_loss_and_gradients(self):
        model = make().train()
        loss = model(ids(), labels=ids()).loss
        found = logits(model, ids())
        shifted = torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids()[:, 1:].flatten())
        assert loss.item() == pytest.approx(shifted.item(), rel=1e-5)
        loss.backward()
        plain = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model.gradient_checkpointing_enable()
        model(ids(), labels=ids()).loss.backward()
        for a, b in zip(plain, (p.grad for p in model.parameters()), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.slow
    def test_compiled(self, model):
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(logits(compiled, ids()), logits(model, ids()))

    def test_micro_batches_share_the_count_of_labels(self):
        """Transformers' Trainer gives it and divides by nothing else: two halves add up to the whole."""
        model = make()
        tokens = ids(4, 12)
        labels = tokens.clone()
        labels[0, 3:] = -100
        count = (labels[:, 1:] != -100).sum()
        whole = model(tokens, labels=labels).loss
        halves = [model(tokens[r], labels=labels[r], num_items_in_batch=count).loss for r in (slice(2), slice(2, 4))]
        assert sum(halves).item() == pytest.approx(whole.item(), rel=1e-5)

    def test_last_logits_only(self, model):
        torch.testing.assert_close(logits(model, ids(), logits_to_keep=3), logits(model, ids())[:, -3:])


def test_the_vocabulary_is_fixed(model):
    with pytest.raises(ValueError, match="vocabulary of a megamem model is fixed"):
        model.resize_token_embeddings(99)


@pytest.mark.parametrize("release", ["4.57.1", "5.2.0", "6.0.0"])
def test_transformers_out_of_range(monkeypatch, release):
    monkeypatch.setattr("megamem.hf.version.version", lambda name: release)
    with pytest.raises(DependencyError, match=rf"transformers {release} is not supported; install transformers>=5\.10"):
        check_transformers()


def test_an_exported_tokenizer_adds_nothing_in_front(tmp_path):
    """Training encodes texts as they are; an imported tokenizer may come with a template that begins with BOS."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import AutoTokenizer

    from megamem.hf.tokenizer import export_tokenizer
    from tokenization.importing import import_tokenizer

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast = Fast(models.BPE({piece: i for i, piece in enumerate(sorted(alphabet))}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    begin = ("<s>", fast.token_to_id("<s>"))
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    (tmp_path / "source").mkdir()
    fast.save(str(tmp_path / "source" / "tokenizer.json"))
    ours = import_tokenizer(tmp_path / "source", tmp_path / "ours", "</s>")
    (tmp_path / "out").mkdir()
    export_tokenizer(tmp_path / "ours", ours, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("It was")["input_ids"] == ours.encode("It was").tolist()


def test_an_exported_tokenizer_decodes_as_ours(tmp_path, monkeypatch):
    """Words that it does not know are left out by both; another decoder is found."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers

    from megamem.errors import ConversionError
    from megamem.hf.tokenizer import export_tokenizer
    from tokenization.importing import import_tokenizer
    from tokenization.tokenizer import Tokenizer

    fast = Fast(models.WordLevel({"[UNK]": 0, "</s>": 1, "the": 2}, "[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(["[UNK]", "</s>"])
    (tmp_path / "source").mkdir()
    fast.save(str(tmp_path / "source" / "tokenizer.json"))
    ours = import_tokenizer(tmp_path / "source", tmp_path / "ours", "</s>")
    (tmp_path / "out").mkdir()
    export_tokenizer(tmp_path / "ours", ours, tmp_path / "out")
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: "other words")
    with pytest.raises(ConversionError, match=r"transformers decodes 'other words' as"):
        export_tokenizer(tmp_path / "ours", ours, tmp_path / "out")


def test_a_llama_with_grouped_heads_computes_the_same():
    ours = make(memory=[], mixer="full_attention")
    shape = ours.config.model
    assert is_llama(shape)
    assert shape.kv_heads < shape.heads
    llama = LlamaForCausalLM(llama_config(shape, 64)).eval()
    llama.load_state_dict({renamed(name, LLAMA): value for name, value in ours.model.state_dict().items()})
    expected = logits(ours, ids())
    # FP32, other kernels
    assert (logits(llama, ids()) - expected).abs().max() <= 1e-5 * expected.abs().max()
