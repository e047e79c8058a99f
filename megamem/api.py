"""megamem as a library: what `import megamem` offers. Everything heavy is imported when it is first used.

```python
import megamem

config = megamem.load_config("configs/recipes/demo.yaml", ["model.layers=2"])
model = megamem.build_model(config)                      # weights drawn from the run's seed
model = megamem.load_model("runs/my-run")                # a trained run, a checkpoint or an export
evaluator = megamem.evaluator("runs/my-run")             # what reads with it: losses, continuations, scores
print(megamem.evaluate("runs/my-run").losses.perplexity)
print(megamem.generate("runs/my-run", "It was"))
print(megamem.plan("configs/recipes/demo.yaml", devices=2, device="cpu").days)
memory = megamem.mixer("titans", hidden_size=512, heads=8, chunk_size=256)   # for your own model
```
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from megamem.config.model import ModelConfig
    from megamem.config.run import RunConfig
    from megamem.evaluation.evaluator import Evaluator
    from megamem.evaluation.result import EvaluationResult
    from megamem.memory.standalone import StandaloneMixer
    from megamem.model.stage import Stage
    from megamem.planning.plan import PlanReport

AnyPath = str | PathLike[str]


def load_config(path: AnyPath, overrides: Sequence[str] = (), model: AnyPath | None = None) -> RunConfig:
    """Read and check the configuration of a run.

    Args:
        path: YAML file of the run or recipe.
        overrides: `section.key=value`, as on the command line.
        model: YAML file whose `model` section the run takes, as `megamem train RECIPE --model FILE` does.
    Raises: ConfigError naming file, key, value and what would be valid.
    """
    from megamem.config.recipe import load_run

    return load_run(Path(path), overrides, None if model is None else Path(model))


def build_model(
    config: RunConfig | ModelConfig | AnyPath,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Stage:
    """Build a whole model in this process, with the weights that a training starts from.

    Args:
        config: of a run, of a model, or a YAML file of a run.
        seed: of the initial weights; the run's `training.seed` if not given, 0 for a model's configuration.
        dtype: of the weights; float32 if not given.
    Returns: a `torch.nn.Module` in training mode; `read_chunk` reads tokens, `docs/library.md` shows how.
    Raises: ConfigError for a configuration that is not valid.
    """
    import torch

    from megamem.config.model import ModelConfig
    from megamem.model.stage import build_stage
    from megamem.parallel.linears import PlainLinears, initialize_parameters

    if isinstance(config, str | PathLike):
        config = load_config(config)
    model = config if isinstance(config, ModelConfig) else config.model
    if seed is None:
        seed = 0 if isinstance(config, ModelConfig) else config.training.seed
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed)
    return stage.to(device=torch.device(device), dtype=dtype or torch.float32)


def load_model(
    path: AnyPath, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Stage | PreTrainedModel:
    """Load a trained model in evaluation mode.

    Args:
        path: run folder (its newest checkpoint), checkpoint folder, or an export of `megamem convert to-hf`.
        dtype: of the weights; float32 if not given.
    Returns: the model as training computes it; for an export the transformers model.
    Raises: CheckpointError, ConversionError or ConfigError naming the file that is missing or damaged.
    """
    import torch

    from megamem.hf.trained import is_exported

    folder, dtype = Path(path), dtype or torch.float32
    if is_exported(folder):
        from megamem.hf.exported import open_export

        model, _ = open_export(folder, dtype)
        moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]  # `to` is torch's, behind a decorator
        return moved
    from checkpoints.trained import open_run

    return open_run(folder).load(dtype, device)


def evaluator(
    model: Stage | PreTrainedModel | AnyPath,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    rows: int = 8,
) -> Evaluator:
    """Return what reads with a model: its losses on documents, continuations of prompts, scores of given tokens.

    Args:
        model: a path as `load_model` takes it, or a model in hand, which stays as and where it is.
        dtype, device: as for `load_model`; of no use with a model in hand.
        rows: documents or requests that are read side by side.
    Raises: as `load_model`; ValueError for a transformers model that is not megamem's.
    """
    from megamem.evaluation.evaluator import Evaluator
    from megamem.model.stage import Stage

    found = load_model(model, dtype, device) if isinstance(model, str | PathLike) else model
    stage = found if isinstance(found, Stage) else found.model
    if not isinstance(stage, Stage):
        raise ValueError(f"{type(found).__name__}: is read by transformers; give the checkpoint that it was made from")
    return Evaluator(stage, rows=rows)


def mixer(
    kind: str,
    *,
    hidden_size: int,
    heads: int,
    chunk_size: int,
    kv_heads: int | None = None,
    layer: int = 0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> StandaloneMixer:
    """Make one memory mechanism for use inside a model of your own.

    Args:
        kind: a registered mechanism (`megamem mechanisms` lists them with their options).
        hidden_size, heads, kv_heads: width of the hidden states that it mixes; its heads.
        chunk_size: tokens of a chunk, which the mechanism's blocks divide. Calls may have any number of tokens.
        layer: number of the layer, from which some mechanisms derive constants.
        seed: of the initial weights.
        options: fields of the mechanism.
    Returns: a module that maps (hidden, state) to (mixed, state); the state is the caller's.
    Raises: ConfigError for an unknown kind or option.
    """
    import torch

    from megamem.memory.standalone import make_standalone

    sizes = {"hidden_size": hidden_size, "heads": heads, "kv_heads": kv_heads, "chunk_size": chunk_size}
    return make_standalone({"kind": kind, **options}, sizes, layer, seed).to(
        device=torch.device(device), dtype=dtype or torch.float32
    )


def evaluate(
    path: AnyPath,
    overrides: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> EvaluationResult:
    """Evaluate a trained run on its held-out text: the figures of `megamem evaluate`.

    Args:
        path: run folder or checkpoint.
        overrides: of the run's configuration, `data.validation=[OTHER]` or `evaluation.final_max_tokens=10000`.
        device: CUDA where there is one if not given.
    Raises: CheckpointError, ConfigError or DataError in one line.
    """
    import torch

    from checkpoints.trained import open_run
    from megamem.training.held_out import evaluate_run

    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return evaluate_run(open_run(Path(path)).changed(overrides), dtype or torch.float32, chosen)


def generate(
    path: AnyPath,
    prompt: str,
    max_new_tokens: int = 100,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> str:
    """Continue a text with a trained run.

    Args:
        path: run folder or checkpoint whose run names a tokenizer.
        temperature: 0 takes the likeliest token.
    Returns: the new text.
    Raises: CheckpointError, ConfigError or DataError in one line; ValueError for settings that make no sense.
    """
    import torch

    from checkpoints.trained import open_run
    from megamem.evaluation.evaluator import Evaluator
    from megamem.evaluation.sampling import Sampling
    from megamem.evaluation.stream_text import stream_text, trained_tokenizer

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    run = open_run(Path(path))
    tokenizer = trained_tokenizer(run.config, str(path))
    parts: list[str] = []
    stage = run.load(dtype or torch.float32, device)
    stream_text(Evaluator(stage), tokenizer, prompt, max_new_tokens, sampling, parts.append)
    return "".join(parts)


def plan(config: RunConfig | AnyPath, devices: int | None = None, device: str = "h100") -> PlanReport:
    """Plan a run before it starts: bytes of every rank, traffic, time, whether it fits.

    Args:
        config: of the run, or its YAML file.
        devices: how many; as configured if not given.
        device: h100, h200, a100, cpu, or a YAML file like megamem/planning/devices.yaml.
    Raises: ConfigError or LayoutError for what cannot be planned.
    """
    from megamem.planning.activations import Activations
    from megamem.planning.auto import resolve_for
    from megamem.planning.machines import kind_of, machine
    from megamem.planning.plan import data_parallel, make_plan

    if isinstance(config, str | PathLike):
        config = load_config(config)
    activations = Activations.of_run(config, device=kind_of(device))
    config = resolve_for(config, devices, device, activations)
    dp_size = data_parallel(config, devices or config.auto.devices)
    ranks = dp_size * config.parallel.tp * config.parallel.pp
    return make_plan(config, dp_size, machine(device, ranks), activations.of_phase(config))
