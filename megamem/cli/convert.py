"""`megamem convert`: models to and from Hugging Face's form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.compute import compute_dtype
from megamem.cli.options import Json, Precision
from megamem.cli.output import console, write_json, write_line

convert_app = typer.Typer(no_args_is_help=True, help="Models to and from Hugging Face's form.")


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
    from checkpoints.trained import open_run
    from megamem.evaluation.run import Passes
    from megamem.hf.export import to_hf as export
    from megamem.hf.figures import held_out_figures

    compute_dtype(dtype)  # refuses an unknown one before anything is read
    run = open_run(model)
    measure = evaluation_tokens > 0 and bool(run.config.data.validation)
    with Passes(console if measure and not as_json else None) as passes:
        facts = export(
            run.checkpoint,
            out,
            dtype=dtype,
            shard_bytes=int(shard_gib * 2**30),
            native=native,
            tokenizer=None if no_tokenizer else tokenizer or run.config.data.tokenizer,
            evaluate=(
                lambda stage: held_out_figures(stage, run.config, evaluation_tokens, passes.named("held-out text"))
            ) if measure else None,
        )  # fmt: skip
    if as_json:
        write_json(facts)
        return
    parity = facts["parity"]
    write_line(
        f"{out}: {facts['parameters']:,} parameters, {facts['architecture']}, {dtype}; logits differ from the training "
        f"model's by at most {parity['max_diff']:.3g} over {parity['tokens']:,} tokens"
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
    eos: Annotated[str | None, typer.Option(help="token that ends documents, if the source does not say")] = None,
    as_json: Json = False,
) -> None:
    """Read a Llama, a GPT-2 or an export of ours as weights to start training from."""
    from megamem.hf.importing import from_hf as read

    facts = read(source, out, overrides or [], vocab_multiple, eos)
    if as_json:
        write_json(facts)
        return
    new, unused = len(facts["new_parameters"]), len(facts["unused"])
    write_line(
        f"{out}: {facts['parameters']:,} parameters of a {facts['architecture']}"
        f"{f', {new} new parameters' if new else ''}"
        f"{f', {unused} tensors of the source unused' if unused else ''}"
        f"{'' if facts['tokenizer'] else ', no tokenizer found'}\n"
        f"train with `base: {out / 'model.yaml'}` and training.init_from={out / 'weights.safetensors'}"
    )
