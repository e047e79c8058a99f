"""`megamem convert`, `generate` and `evaluate`: what is done with a trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from megamem.cli.checkpoint import one_checkpoint
from megamem.errors import ConfigError, ConversionError, DataError, DependencyError

if TYPE_CHECKING:
    import torch

    from checkpoints.folder import Checkpoint
    from megamem.config.run import RunConfig
    from megamem.model.stage import Stage

convert_app = typer.Typer(no_args_is_help=True, help="Models to and from Hugging Face's form.")
console = Console(soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="machine-readable")]
Model = Annotated[Path, typer.Argument(help="checkpoint (step-NNNNNNNN), run folder, or exported model")]
Precision = Annotated[str, typer.Option("--dtype", help="fp32 or bf16")]


def _dtype(name: str) -> torch.dtype:
    from megamem.memory.base import DTYPES

    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: give fp32 or bf16")
    if name == "bf16":
        from megamem.hardware import avoid_broken_amx

        avoid_broken_amx()
    return DTYPES[name]


def _device(name: str | None) -> torch.device:
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _run_config(checkpoint: Checkpoint) -> RunConfig:
    """The configuration of the run that saved it."""
    from megamem.config.load import parse_config
    from megamem.config.run import RunConfig

    return parse_config(RunConfig, checkpoint.run()["config"], f"{checkpoint.path / 'run.json'}: config")


def _trained(checkpoint: Checkpoint, config: RunConfig, dtype: torch.dtype, device: torch.device) -> Stage:
    """The whole model of a run, for evaluation."""
    from checkpoints.folder import verify
    from checkpoints.whole import whole_model

    verify(checkpoint)
    return whole_model(checkpoint, config.model, dtype).to(device)


@convert_app.command("to-hf")
def to_hf(
    model: Annotated[Path, typer.Argument(help="checkpoint (step-NNNNNNNN), or run folder for its newest")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    dtype: Precision = "fp32",
    shard_gib: Annotated[float, typer.Option(min=0.001, help="largest safetensors file, GiB")] = 4.0,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer folder; the run's if not given")] = None,
    no_tokenizer: Annotated[bool, typer.Option("--no-tokenizer", help="write none")] = False,
    native: Annotated[bool, typer.Option(help="write a plain Transformer++ as LlamaForCausalLM")] = True,
    evaluation_tokens: Annotated[
        int, typer.Option(min=0, help="held-out tokens the card's figures are measured on; 0 for none")
    ] = 65_536,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of any layout as a folder for AutoModelForCausalLM."""
    from megamem.hf.export import to_hf as export
    from megamem.hf.figures import held_out_figures

    _dtype(dtype)
    checkpoint = one_checkpoint(model)
    config = _run_config(checkpoint)
    measure = evaluation_tokens > 0 and bool(config.data.validation)
    facts = export(
        checkpoint,
        out,
        dtype=dtype,
        shard_bytes=int(shard_gib * 2**30),
        native=native,
        tokenizer=None if no_tokenizer else tokenizer or config.data.tokenizer,
        evaluate=(lambda stage: held_out_figures(stage, config, evaluation_tokens)) if measure else None,
    )
    if as_json:
        console.file.write(json.dumps(facts) + "\n")
        return
    parity = facts["parity"]
    console.print(
        f"{out}: {facts['parameters']:,} parameters, {facts['architecture']}, {dtype}; logits differ from the training "
        f"model's by at most {parity['max_diff']:.3g} over {parity['tokens']:,} tokens",
        highlight=False,
    )


@convert_app.command("from-hf")
def from_hf(
    source: Annotated[Path, typer.Argument(help="folder with config.json and safetensors, or a GGUF file")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="of the model section: chunk_size=512 'memory=[{layers: [8], mixer: elastic_memory}]'"),
    ] = None,
    vocab_multiple: Annotated[int, typer.Option(min=1, help="embedding rows are filled up to a multiple")] = 128,
    as_json: Json = False,
) -> None:
    """Read a Llama, a GPT-2 or an export of ours as weights to start training from."""
    from megamem.hf.importing import from_hf as read

    facts = read(source, out, overrides or [], vocab_multiple)
    if as_json:
        console.file.write(json.dumps(facts) + "\n")
        return
    new, unused = len(facts["new_parameters"]), len(facts["unused"])
    console.print(
        f"{out}: {facts['parameters']:,} parameters of a {facts['architecture']}"
        f"{f', {new} new parameters' if new else ''}"
        f"{f', {unused} tensors of the source unused' if unused else ''}\n"
        f"train with `base: {out / 'model.yaml'}` and training.init_from={out / 'weights.safetensors'}",
        highlight=False,
    )


def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="text to continue")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file with the text, of any length; - for stdin")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: int = 0,
    dtype: Precision = "fp32",
    device: Annotated[str | None, typer.Option(help="cuda where there is one if not given")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer folder; the run's if not given")] = None,
) -> None:
    """Continue a text, printed as it is made; the memory reads prompts of any length."""
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("generate: give either --prompt or --prompt-file")
    text = prompt if prompt is not None else _read(prompt_file)
    if not text:
        raise DataError("generate: the prompt is empty")
    if top_p == 0:
        raise ConfigError("--top-p 0: leaves no token; give more than 0")
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if (model / "config.json").is_file():
        if tokenizer is not None:
            raise ConfigError(f"--tokenizer {tokenizer}: is for checkpoints; an export brings its own")
        _generate_exported(model, text, max_new_tokens, settings, _dtype(dtype), _device(device))
        return
    from megamem.evaluation.generate import Sampling
    from megamem.evaluation.generate import generate as continue_prompts
    from tokenization.tokenizer import Tokenizer

    checkpoint = one_checkpoint(model)
    config = _run_config(checkpoint)
    stage = _trained(checkpoint, config, _dtype(dtype), _device(device))
    folder = tokenizer or config.data.tokenizer
    if folder is None:
        raise ConfigError(f"{model}: its run names no tokenizer; give --tokenizer")
    words = Tokenizer.load(folder)
    if words.vocab_size > config.model.vocab_size:
        raise DataError(f"{folder}: has {words.vocab_size:,} tokens, the model {config.model.vocab_size:,}")
    shown = ""

    def show(_: int, tokens: list[int]) -> bool:
        nonlocal shown
        whole = words.decode(tokens)
        if not whole.endswith("\ufffd"):  # the rest of a character is still to come
            sys.stdout.write(whole.removeprefix(shown))
            sys.stdout.flush()
            shown = whole
        return False

    continue_prompts(
        stage,
        [words.encode(text).tolist()],
        max_new_tokens,
        topology=None,
        device=_device(device),
        dtype=_dtype(dtype),
        sampling=Sampling(**settings),
        end_token=words.eos_id,
        stop=show,
    )
    sys.stdout.write("\n")


def _read(path: Path | None) -> str:
    assert path is not None
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def _generate_exported(
    folder: Path, text: str, new_tokens: int, settings: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Through transformers' own generation and streamer."""
    import torch

    model, words = open_export(folder, dtype)
    from transformers import TextStreamer

    torch.manual_seed(settings["seed"])
    sampling = {name: value for name, value in settings.items() if name != "seed"}
    sampling["top_k"] = settings["top_k"] or 0  # transformers takes 50 where none is given
    inputs = words(text, return_tensors="pt").to(device)
    model.to(device).generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=new_tokens,
        streamer=TextStreamer(words, skip_prompt=True, skip_special_tokens=True),
        **(sampling | {"do_sample": True} if settings["temperature"] > 0 else {"do_sample": False}),
    )


def open_export(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """An exported model and its tokenizer. Raises ConversionError if they cannot be read."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import megamem.hf  # noqa: F401, registers the architecture; says what is wrong with transformers

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConversionError(f"{folder}: cannot be opened ({' '.join(str(error).split())[:200]})") from None
    model, found = loaded
    if found["missing_keys"]:
        raise ConversionError(f"{folder}: its files lack {min(found['missing_keys'])}")
    return model.eval(), words


def evaluate(
    model: Model,
    overrides: Annotated[list[str] | None, typer.Argument(help="of the run's configuration: key=value")] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, separated by commas")] = None,
    include_path: Annotated[Path | None, typer.Option(help="folder with task files of your own")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="documents of each task")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="tokens of a task's window; trained length")] = None,
    rows: Annotated[int, typer.Option(min=1, help="requests read side by side")] = 8,
    dtype: Precision = "fp32",
    device: Annotated[str | None, typer.Option(help="cuda where there is one if not given")] = None,
    as_json: Json = False,
) -> None:
    """Held-out losses of a checkpoint, or lm-eval's tasks on a checkpoint or an export."""
    if (model / "config.json").is_file() and tasks is None:
        raise ConfigError(f"{model}: an export has no held-out text; give --tasks, or evaluate its checkpoint")
    if tasks is not None and overrides:
        raise ConfigError(f"{overrides[0]}: overrides are for held-out losses, not for --tasks")
    if tasks is None:
        figures = _held_out(model, overrides or [], _dtype(dtype), device)
    else:
        figures = _tasks(model, tasks.split(","), include_path, limit, max_length, rows, _dtype(dtype), device)
    if as_json or tasks is not None:
        console.file.write(json.dumps(figures, indent=None if as_json else 2) + "\n")


def _held_out(model: Path, overrides: list[str], dtype: torch.dtype, device: str | None) -> dict[str, Any]:
    from megamem.config.load import apply_override, parse_config
    from megamem.config.run import RunConfig
    from megamem.evaluation.report import finite, result_table
    from megamem.evaluation.run import final_evaluation
    from megamem.parallel.topology import Topology
    from megamem.training.build import held_out_documents, open_tokenizer

    checkpoint = one_checkpoint(model)
    tree = _run_config(checkpoint).model_dump(mode="json")
    for override in overrides:
        tree = apply_override(tree, override)
    config = parse_config(RunConfig, tree, f"{checkpoint.path / 'run.json'}: config")
    if not config.data.validation:
        raise ConfigError(f"{model}: its run names no held-out text; give data.validation='[SHARDS]'")
    topology = Topology.start(device=str(_device(device)))
    stage = _trained(checkpoint, config, dtype, topology.device)
    figures = final_evaluation(
        stage,
        lambda: held_out_documents(config),
        open_tokenizer(config),
        config,
        topology,
        dtype=dtype,
        console=console,
    )
    figures = {name: value for name, value in finite(figures).items() if not isinstance(value, dict)}
    console.print(result_table(figures, title=f"{config.name}, step {checkpoint.step}"))
    return figures


def _tasks(
    model: Path,
    tasks: list[str],
    include_path: Path | None,
    limit: int | None,
    max_length: int | None,
    rows: int,
    dtype: torch.dtype,
    device: str | None,
) -> dict[str, Any]:
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise DependencyError("--tasks needs lm-eval; pip install 'megamem[eval]'") from None
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ConfigError(f"--tasks {unknown[0]}: no such task; --include-path names a folder with tasks of your own")
    lm: Any
    if (model / "config.json").is_file():
        exported, words = open_export(model, dtype)
        lm = HFLM(
            pretrained=exported.to(_device(device)),
            tokenizer=words,
            max_length=max_length,
            batch_size=rows,
            softmax_dtype="float32",
        )
    else:
        from megamem.evaluation.harness import HarnessModel
        from tokenization.tokenizer import Tokenizer

        checkpoint = one_checkpoint(model)
        config = _run_config(checkpoint)
        if config.data.tokenizer is None:
            raise ConfigError(f"{model}: its run names no tokenizer")
        stage = _trained(checkpoint, config, dtype, _device(device))
        lm = HarnessModel(
            stage,
            Tokenizer.load(config.data.tokenizer),
            topology=None,
            device=_device(device),
            dtype=dtype,
            max_length=max_length or config.data.sequence_length,
            rows=rows,
        )
    found = simple_evaluate(model=lm, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=0)
    results: dict[str, Any] = found["results"]
    return results
