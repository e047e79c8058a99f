"""`MegamemForCausalLM`: the training code with torch's own layers, behind transformers' interface."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as hf_init
from transformers.modeling_outputs import CausalLMOutputWithPast

from megamem.hf.cache import MegamemCache, padding_of
from megamem.hf.configuration import MegamemConfig
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, info
from megamem.pipeline.reader import ChunkReader


class MegamemForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder with memory. Parameters are called `model.NAME`, NAME as in training checkpoints."""

    config_class = MegamemConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]
    _is_stateful = True  # what was read cannot be taken back: no assisted generation

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__(config)
        self.model = build_stage(config.model, PlainLinears())
        for module in self.modules():  # loading replaces parameters and loses what was declared beside them
            module.__dict__["declared"] = {name: info(p) for name, p in module.named_parameters(recurse=False)}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head, which is the embedding where they are tied (but for an adaptive softmax's)."""
        head = getattr(self.model, "head", None)
        return self.model.embedding if head is None else head

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Raise ValueError: the vocabulary is part of what the model was trained with."""
        raise ValueError("the vocabulary of a megamem model is fixed; train with a larger model.vocab_size")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Values of parameters that no file gives, as training draws them."""
        for name, declared in module.__dict__.get("declared", {}).items():
            parameter = getattr(module, name)
            value = declared.init(tuple(parameter.shape), torch.default_generator)
            hf_init.copy_(parameter, value.to(parameter.device, parameter.dtype))

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """All blocks, through torch's checkpoint, as training does."""
        self.model.recompute = enable

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        """Start generation with an empty cache of our kind. (What is returned nobody reads.)"""
        # any prompt is read a chunk at a time; transformers' own cuts would fall into a row's left padding
        generation_config.prefill_chunk_size = None
        if generation_config.use_cache is False or model_kwargs.get("past_key_values") is not None:
            return False
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation {generation_config.cache_implementation!r}: a memory state has one form; "
                "leave it out"
            )
        model_kwargs["past_key_values"] = MegamemCache()
        return True

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See `GenerationMixin`. Raises ValueError for prompts padded on the right."""
        if is_first_iteration and attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ValueError("prompts are padded on the right; generation needs padding on the left (padding_side)")
        kwargs.pop("position_ids", None)  # they follow from the mask
        given = (input_ids, next_sequence_length, past_key_values, attention_mask, inputs_embeds, is_first_iteration)
        inputs: dict[str, Any] = cast(Any, GenerationMixin).prepare_inputs_for_generation(self, *given, **kwargs)
        return inputs

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: MegamemCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Read tokens on from where `past_key_values` stands, or from the start of documents.

        Args:
            input_ids: [batch, tokens] int64.
            attention_mask: [batch, tokens read so far and now], 0 on padding before a row's tokens; after them only
                where nothing is read on. Looked at in the first call.
            labels: [batch, tokens], -100 where none; shifted by one here.
            logits_to_keep: of the last so many tokens; of all if 0.
        Returns: logits [batch, tokens kept, vocabulary], the loss if there are labels, the cache.
        Raises: ValueError for what the model cannot read.
        """
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("megamem models read input_ids; inputs_embeds is not supported")
        cache = self._cache(past_key_values)
        if not cache.is_initialized:
            input_ids = self._begin(cache, input_ids, attention_mask)
        else:
            self._check_continuation(cache, input_ids, attention_mask)
        keep = logits_to_keep or input_ids.shape[1]
        hidden = self._reader().read(input_ids.T, cache.place(), cache.groups, keep)
        assert hidden is not None
        cache.seen += input_ids.shape[1]
        logits = self.model.logits(hidden.transpose(0, 1).contiguous())
        logits = logits[..., : self.config.vocab_size].contiguous()  # without rows that only fill up shares
        loss = None
        if labels is not None:
            # transformers' Trainer gives the number of labels of all micro-batches and then divides by nothing else
            count = kwargs.get("num_items_in_batch")
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=count
            )
        keeps_cache = self.config.use_cache if use_cache is None else use_cache
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if keeps_cache else None)

    def _cache(self, given: Any) -> MegamemCache:
        if given is None:
            return MegamemCache()
        if not isinstance(given, MegamemCache):
            raise ValueError(f"past_key_values is a {type(given).__name__}; megamem models need a MegamemCache")
        if given.ended:
            raise ValueError("the rows read before were padded on the right: nothing can follow them")
        return given

    def _begin(self, cache: MegamemCache, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Begin documents with fresh states; return ids [batch, tokens] with padding made harmless."""
        rows, tokens = input_ids.shape
        cache.padding, cache.ended = (0,) * rows, False
        if attention_mask is not None:
            if attention_mask.ndim != 2 or attention_mask.shape != input_ids.shape:
                raise ValueError(
                    f"attention_mask has shape {list(attention_mask.shape)}; megamem models need one of [batch, tokens]"
                    f" = {[rows, tokens]}"
                )
            if not bool(attention_mask.all()):
                cache.padding, cache.ended = padding_of(attention_mask.long().tolist())
                input_ids = input_ids * attention_mask.to(input_ids.dtype)
        self._check_ids(input_ids)
        cache.specs = self.model.state_specs
        cache.groups = self._reader().begin(cache.place())
        return input_ids

    def _check_ids(self, input_ids: Tensor) -> None:
        """Raise ValueError for an id of input_ids [batch, tokens] that is not in the vocabulary."""
        least, most = torch.stack(torch.aminmax(input_ids)).tolist()
        if least < 0 or most >= self.config.vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self.config.vocab_size:,}")

    def _check_continuation(self, cache: MegamemCache, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        """Raise ValueError where input_ids [batch, tokens] cannot follow.

        Single tokens, which generation makes itself, are not looked at.
        """
        rows, tokens = input_ids.shape
        if rows != cache.batch_size:
            raise ValueError(f"{rows} rows cannot continue a cache of {cache.batch_size}")
        if tokens == 1:
            return
        self._check_ids(input_ids)
        if attention_mask is not None and not bool(attention_mask[:, -tokens:].all()):
            raise ValueError(
                "padding between what was read and what follows: a memory cannot pass over it; continue rows with as "
                "many tokens each, or read them from their start"
            )

    def _reader(self) -> ChunkReader:
        """Return what reads on; each layer's state lies on the layer's own device."""
        return ChunkReader(self.model)
