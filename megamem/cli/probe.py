"""`megamem probe`: what is in the vectors that a trained model makes of text."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from megamem.cli.options import Json, Overrides, Processes
from megamem.cli.output import console, write_json, write_line
from megamem.errors import ConfigError

probe_app = typer.Typer(no_args_is_help=True, help="Measure what is in the vectors that a trained model makes of text.")


@probe_app.callback()
def _group() -> None:
    """Keep `information` a command of its own, though it is the only one."""


@probe_app.command("information")
def information(
    model: Annotated[
        Path, typer.Argument(help="run folder, checkpoint, or folder of `megamem convert from-hf`; it is only read")
    ],
    overrides: Overrides = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file of a run whose data and training the decoder has; the model's own")
    ] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="the model's random start weights instead, for comparison")
    ] = False,
    token: Annotated[str, typer.Option(help="whose vector is taken of each chunk: last, or last_but_one")] = "last",
    expansion: Annotated[str, typer.Option(help="how it becomes the decoder's input: unroll, or repeat")] = "unroll",
    tokens: Annotated[int | None, typer.Option(min=1, help="tokens of a chunk; as many as the model's")] = None,
    decoder_layers: Annotated[int | None, typer.Option(min=1, help="of the decoder; as many as the model's")] = None,
    out: Annotated[Path | None, typer.Option(help="run folder of the decoder; MODEL/probes/information-...")] = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Train a decoder to tell a chunk's tokens from one vector of a frozen model, and report how well it does.

    The decoder's run can be stopped and goes on by the same command, as `megamem train`.
    """
    from megamem.cli.train import train
    from megamem.config.load import apply_overrides, dump_yaml, parse_config
    from megamem.config.recipe import read_recipe
    from megamem.config.run import RunConfig
    from megamem.evaluation.information import PICTURE, information_table, probe_tree, write_information
    from megamem.training.devices import is_rank_0
    from megamem.training.information import open_frozen, provide_weights

    frozen = open_frozen(model, untrained)
    given = read_recipe(recipe) if recipe else frozen.recipe
    if given is None:
        raise ConfigError(f"{model}: has no data to train a decoder on; add --recipe FILE of a run")
    folder = out or frozen.folder
    weights = folder.with_name(f"{folder.name}.encoder.safetensors")
    tree = probe_tree(str(model), frozen.model, given, weights, folder, decoder_layers, tokens)
    tree["model"]["architecture"] |= {"embedded_token": token, "expansion": expansion}
    config = parse_config(RunConfig, apply_overrides(tree, overrides or []), f"the decoder behind {model}")
    if not config.data.validation:
        raise ConfigError(f"{model}: data.validation is empty; name held-out text to measure the decoder on")
    if is_rank_0():
        provide_weights(frozen, weights)
    with TemporaryDirectory() as own:
        # every rank has a file of its own
        written = Path(own) / f"{folder.name}.yaml"
        written.write_text(dump_yaml(config))
        try:
            train(written, processes=processes)
        except typer.Exit as ended:
            if ended.exit_code:
                raise
    if not is_rank_0():
        return
    report = write_information(config)
    if as_json:
        write_json(report.to_dict())
        return
    console.print(information_table(report, f"{model}: what one vector retains"))
    write_line(str(config.run_folder / PICTURE))
