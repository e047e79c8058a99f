"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(help="YAML file of the run")]
ModelFile = Annotated[
    Path | None, typer.Option("--model", help="YAML file of the model, which also names the run (configs/models)")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="overrides: section.key=value")]
Processes = Annotated[int | None, typer.Option(help="local processes; PP x TP x DP if not given")]
Readers = Annotated[
    int, typer.Option("--processes", min=1, help="local processes that share the documents, each with the whole model")
]
Json = Annotated[bool, typer.Option("--json", help="machine-readable")]
TrainedModel = Annotated[
    Path, typer.Argument(help="checkpoint (step-NNNNNNNN), run folder, exported or imported model")
]
Precision = Annotated[str, typer.Option("--dtype", help="fp32 or bf16")]
Device = Annotated[str | None, typer.Option(help="cuda where there is one if not given")]
_INPUTS = typer.Argument(
    help="files, folders or patterns (*), local or URLs, of .txt, .jsonl(.gz/.zst), .parquet, .arrow, .tar "
    "(webdataset) or wiki.*.tokens/.raw (WikiText)"
)
TextInputs = Annotated[list[str], _INPUTS]
OptionalTextInputs = Annotated[list[str] | None, _INPUTS]
TextField = Annotated[str, typer.Option(help="field or column that holds the text")]
