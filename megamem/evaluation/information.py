"""What a model's embeddings retain of a text: a decoder is trained to make all tokens of one vector of a frozen model.

Badger, "Language Model Memory and Memory Models for Language", section 4. The vector is what the model's last norm
makes of the last token of a chunk. How well the decoder succeeds on held-out text is measured in two ways (equations 2
and 3):

    entropy ratio   1 - (cross-entropy of the decoder, nats per token) / ln(size of the vocabulary)
    accuracy        share of the tokens whose most probable guess is right

A ratio of 1 is perfect. Frequencies of words alone give one above 0, which depends on the vocabulary: compare with an
encoder that was never trained. The decoder is trained as any run of the `autoencoder` architecture
(`megamem/model/architectures/autoencoder.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from megamem.config.load import Tree
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.evaluation.metrics import read_points
from megamem.evaluation.picture import BLUE, ORANGE, add_grid, new_figure, png
from megamem.evaluation.report import METRICS, finite
from megamem.files import read_json, write_bytes, write_json

NUMBERS, PICTURE = "information.json", "information.png"
"""Files of the report, in the folder of the decoder's run."""
WITH_ENCODER = ("memory_model", "autoencoder")
"""Architectures whose encoder is looked into, not their decoder."""


def encoder_of(model: ModelConfig, where: str) -> Tree:
    """Return the `encoder` section of an autoencoder that embeds chunks as a model does, all sizes given.

    where: what messages call the model.
    Raises: ConfigError for a model that cannot be taken for an encoder.
    """
    architecture: Any = model.architecture
    if architecture.kind in WITH_ENCODER:
        encoder = architecture.encoder
        if encoder is None:
            raise ConfigError(f"{where}: the control of memory models has no encoder; give a model that has one")
        inside, layers = encoder.inside(model), encoder.layers
        mixers = [encoder.mixer_at(model, layer) for layer in range(layers)]
    elif architecture.kind == "decoder":
        inside, layers = model, model.layers
        mixers = [model.configured_mixer(layer) for layer in range(layers)]
    else:
        raise ConfigError(
            f"{where}: what a {architecture.kind} keeps is no vector of its last layer; give a model of architecture "
            f"decoder, {' or '.join(WITH_ENCODER)}"
        )
    return {
        "layers": layers,
        "hidden_size": inside.hidden_size,
        "heads": inside.heads,
        "kv_heads": inside.resolved_kv_heads,
        "head_dim": inside.resolved_head_dim,
        "ffn_size": inside.resolved_ffn_size,
        "mixer": mixers[0].model_dump(mode="json"),
        "memory": [
            {"layers": [layer], "mixer": mixer.model_dump(mode="json")}
            for layer, mixer in enumerate(mixers)
            if mixer != mixers[0]
        ],
    }


def probe_tree(
    name: str,
    model: ModelConfig,
    recipe: Tree,
    weights: Path,
    folder: Path,
    decoder_layers: int | None = None,
    tokens: int | None = None,
) -> Tree:
    """Return the configuration of the run that trains a decoder behind a frozen model.

    Args:
        name: what messages call the model.
        model: the model that is looked into.
        recipe: of a run: its data, optimizer, layout and the length of training are taken.
        weights: the model's, as one safetensors file.
        folder: of the new run.
        decoder_layers: of the decoder, which is as wide as the model; as many as the encoder has if not given.
        tokens: of a chunk, which one embedding stands for; as the model's chunks have if not given.
    Raises: ConfigError for a model that cannot be taken for an encoder, or a recipe that is no run's.
    """
    encoder = encoder_of(model, name)
    shape = model.model_dump(mode="json", exclude={"memory", "mup"})
    sizes = {name: encoder[name] for name in ("hidden_size", "heads", "kv_heads", "head_dim", "ffn_size", "mixer")}
    layers = encoder["layers"] + (decoder_layers or encoder["layers"])
    if folder.parent == folder:
        raise ConfigError(f"{folder}: give a folder below another one")
    kept = ("data", "training", "optimizer", "parallel", "evaluation", "checkpoint", "logging")
    if wrong := next((section for section in kept if not isinstance(recipe.get(section, {}), dict)), None):
        raise ConfigError(f"the recipe for {name}: {wrong}: expected a section, got {recipe[wrong]!r}")
    tree: Tree = {"data": {}, "training": {}, **{section: recipe[section] for section in kept if section in recipe}}
    own = ("objective", "bptt_chunks", "window_order", "phases", "init_from", "freeze", "tokens")
    training = {name: value for name, value in tree["training"].items() if name not in own}
    return {
        **tree,
        "name": folder.name,
        "runs_folder": str(folder.parent),
        "model": {
            **shape,
            **sizes,
            "layers": layers,
            "chunk_size": tokens or model.chunk_size,
            "tie_embeddings": False,
            # what is frozen is read as it is, and so is what is made of it
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "architecture": {"kind": "autoencoder", "encoder": encoder},
        },
        "data": {
            **tree["data"], "sequence_length": tokens or model.chunk_size, "documents": "join", "reset": "none",
            "feeding": "sequences",
        },
        "training": {
            **training, "objective": "autoencode", "freeze": "encoder", "init_from": {"encoder": str(weights)},
        },
        "checkpoint": {name: value for name, value in tree.get("checkpoint", {}).items() if name != "folder"},
    }  # fmt: skip


@dataclass(frozen=True)
class InformationReport:
    """What a decoder found in the embeddings of held-out text."""

    vocabulary: int
    """Tokens of the vocabulary, whose logarithm the entropy ratio divides by."""
    chunk_size: int
    """Tokens that one embedding stands for."""
    embedding_size: int
    """Numbers of an embedding."""
    tokens: int
    """Held-out tokens."""
    loss: float
    """Nats per token."""
    entropy_ratio: float
    """1 - loss / ln(vocabulary)."""
    accuracy: float
    """Share of the tokens whose most probable guess is right."""
    curve: tuple[tuple[float, float, float], ...]
    """(tokens trained on, entropy ratio, accuracy) of the validations while training."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def entropy_ratio(loss: float, vocabulary: int) -> float:
    """Return the share of the largest cross-entropy that is not left (equation 2); loss: nats per token."""
    return 1.0 - loss / math.log(vocabulary)


def information_report(config: RunConfig, figures: Mapping[str, Any]) -> InformationReport:
    """Return the report of a run of an autoencoder. figures: of its final evaluation, as result.json has them."""
    model, metrics = config.model, config.run_folder / METRICS
    architecture: Any = model.architecture
    losses, accuracies = (dict(read_points(metrics, name)) for name in ("val_loss", "val_accuracy"))
    size = model.vocab_size
    return InformationReport(
        vocabulary=size,
        chunk_size=model.chunk_size,
        embedding_size=architecture.encoder.inside(model).hidden_size,
        tokens=figures["val_tokens"],
        loss=figures["val_loss"],
        entropy_ratio=entropy_ratio(figures["val_loss"], size),
        accuracy=figures["val_accuracy"],
        curve=tuple((at, entropy_ratio(loss, size), accuracies[at]) for at, loss in losses.items() if at in accuracies),
    )


def write_information(config: RunConfig) -> InformationReport:
    """Write the report of a finished run into its folder, with its picture, and return it.

    Raises: DataError if the run has no result.
    """
    report = information_report(config, read_json(config.run_folder / "result.json"))
    write_json(config.run_folder / NUMBERS, finite(report.to_dict()))
    write_bytes(config.run_folder / PICTURE, draw_information(report, config.name))
    return report


def draw_information(report: InformationReport, title: str) -> bytes:
    """Return the entropy ratio and the accuracy over the tokens that the decoder was trained on, as PNG."""
    figure = new_figure(7.2, 4.6)
    axes = figure.subplots()
    figure.suptitle(title, fontsize=13, fontweight="bold")
    tokens = [point[0] for point in report.curve]
    for column, (name, color, final) in enumerate(
        (("entropy ratio", BLUE, report.entropy_ratio), ("accuracy", ORANGE, report.accuracy)), start=1
    ):
        axes.plot(tokens, [point[column] for point in report.curve], color=color, marker="o", markersize=4, label=name)
        axes.axhline(final, color=color, linewidth=1.1, linestyle=":", label=f"{name}, final: {final:.3f}")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("tokens that the decoder was trained on")
    axes.set_title(
        f"{report.chunk_size:,} tokens of {report.vocabulary:,} kinds from {report.embedding_size:,} numbers",
        fontsize=10,
    )
    add_grid(axes)
    axes.legend(frameon=False, fontsize=9)
    return png(figure)


def information_table(report: InformationReport, title: str) -> Table:
    """Return the figures as a table for people."""
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, value in {
        "entropy ratio": f"{report.entropy_ratio:.4f} of ln {report.vocabulary:,}",
        "tokens told right": f"{report.accuracy:.2%}",
        "loss": f"{report.loss:.4f} nats per token",
        "one embedding": f"{report.embedding_size:,} numbers for {report.chunk_size:,} tokens",
        "held-out tokens": f"{report.tokens:,}",
    }.items():
        table.add_row(label, value)
    return table
