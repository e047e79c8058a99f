"""The README.md of an export: what the model is, what it was trained on, what was measured when it was converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamem.config.model import ModelConfig
from megamem.costs.parameters import parameter_counts

USE = {
    "megamem": "import megamem.hf  # registers the architecture; pip install 'megamem[hf]'\n",
    "llama": "",
}


def model_card(name: str, model: ModelConfig, run: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Markdown with the metadata block the hub reads. run: a checkpoint's run.json; facts: of the conversion."""
    config = run["config"]
    counts = parameter_counts(model)
    mixers: dict[str, list[int]] = {}
    for layer in range(model.layers):
        mixers.setdefault(model.mixer_at(layer).kind, []).append(layer)
    kinds = "; ".join(f"`{kind}` at layers {_ranges(layers)}" for kind, layers in mixers.items())
    sources = ", ".join(f"`{source}`" for source in _sources(config["data"]["sources"]))
    parity = facts["parity"]
    figures = "".join(f"| {key} | {value:,.6g} |\n" for key, value in facts["evaluation"].items())
    evaluation = f"\n## Evaluation, measured at conversion\n\n| | |\n|---|---|\n{figures}" if figures else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- megamem
- memory
---

# {name}

A decoder with {counts["total"]:,} parameters ({counts["non_embedding"]:,} without embedding and head): {model.layers}
layers of {model.hidden_size}, {model.heads} query and {model.resolved_kv_heads} key heads, vocabulary of
{model.vocab_size:,}, chunks of {model.chunk_size:,} tokens. Mixers: {kinds}.

Trained with megamem {facts["megamem"]} for {facts["step"]:,} steps = {facts["tokens"]:,} tokens of {sources}
(sequences of {config["data"]["sequence_length"]:,} tokens, {config["training"]["batch_tokens"]:,} tokens a step,
{config["training"]["precision"].upper()}). Weights here: {facts["dtype"].upper()}.

## Use

```python
{USE[facts["architecture"]]}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
inputs = tokenizer("It was the best of times", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```
{evaluation}
## Conversion

Against the training model on {parity["tokens"]:,} random tokens: logits differ by at most {parity["max_diff"]:.3g} (the
largest logit is {parity["max_logit"]:.3g}). Checkpoint: `{facts["checkpoint"]}`.
"""


def _sources(value: Any) -> list[str]:
    """Names of the data's sources, which are paths or mappings with one."""
    entries = value if isinstance(value, list) else [value]
    return [str(entry["path"] if isinstance(entry, Mapping) else entry) for entry in entries]


def _ranges(layers: list[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
