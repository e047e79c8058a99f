"""Held-out loss by the length of the memory: trained models read with another `memory_length` than in training.

Ji et al., "LaMemo: Language Modeling with Look-Ahead Memory", 2022, section 5 and figure 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from megamem.config.model import MIXERS, ModelConfig
from megamem.errors import ConfigError
from megamem.evaluation.losses import LossReport
from megamem.evaluation.picture import add_grid, new_figure, png
from megamem.evaluation.report import write_new

NUMBERS, PICTURE = "memory_length.json", "memory_length.png"
FIELD = "memory_length"
"""The field of mixers whose memory may be read with another length."""


@dataclass(frozen=True)
class LengthLoss:
    """Held-out loss of one model with one length of its memory."""

    segments: int
    """Length of the memory in chunks."""
    memory_length: int
    """The same in tokens."""
    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """None where bytes are not known."""
    bits_per_character: float | None
    """None where characters are not known."""

    @classmethod
    def of(cls, segments: int, chunk: int, report: LossReport) -> LengthLoss:
        """Return the figures of a memory of so many chunks of `chunk` tokens."""
        return cls(
            segments=segments,
            memory_length=segments * chunk,
            loss=report.loss,
            perplexity=report.perplexity,
            bits_per_byte=report.bits_per_byte,
            bits_per_character=report.bits_per_character,
        )


@dataclass(frozen=True)
class LengthCurve:
    """Held-out losses of one model, all of the same tokens."""

    origin: str
    """Where the model lies."""
    title: str
    """Its name, for people."""
    mixers: tuple[str, ...]
    """Kinds of the mixers whose memory has another length."""
    chunk_size: int
    trained: tuple[int, ...]
    """Lengths of their memories in training, in tokens."""
    tokens: int
    """Predicted tokens."""
    points: tuple[LengthLoss, ...]
    """One for each length, in the order asked for."""


class MixerLength(NamedTuple):
    """A mixer whose memory has a length."""

    kind: str
    """Kind of the mixer."""
    length: int
    """Length of its memory in tokens."""


def length_fields(model: ModelConfig, origin: str) -> dict[str, MixerLength]:
    """Return the keys of a run's configuration that give the length of a memory, each with its mixer.

    The mixer of the lowest layer comes first. origin: what messages call the model.
    Raises: ConfigError where no layer has a mixer with such a field.
    """
    mixers = {"model.mixer": (model.mixer, set(range(model.layers)))}
    for number, entry in enumerate(model.memory):
        layers = set(entry.layers)
        mixers[f"model.memory.{number}.mixer"] = (entry.mixer, layers)
        mixers["model.mixer"][1].difference_update(layers)
    found: dict[str, tuple[int, MixerLength]] = {}
    for key, (mixer, layers) in mixers.items():
        if layers and FIELD in type(mixer).model_fields:
            length = getattr(mixer, FIELD)
            length = model.chunk_size if length is None else int(length)
            found[f"{key}.{FIELD}"] = min(layers), MixerLength(mixer.kind, length)
    if not found:
        used = sorted({model.mixer_at(layer).kind for layer in range(model.layers)})
        kinds = [kind for kind, config in MIXERS.kinds().items() if FIELD in config.model_fields]
        raise ConfigError(
            f"{origin}: {', '.join(used)} has no {FIELD} to read with; the mixers that have one: {', '.join(kinds)}"
        )
    return {key: mixer for key, (_, mixer) in sorted(found.items(), key=lambda item: item[1][0])}


def write_curves(folder: Path, curves: Sequence[LengthCurve]) -> None:
    """Write the numbers and the picture into a new folder. Raises DataError for one that is there or not writable."""
    write_new(folder, NUMBERS, numbers(curves), {PICTURE: draw_curves(curves)})


def numbers(curves: Sequence[LengthCurve]) -> dict[str, object]:
    """Return all figures as plain data."""
    return {"models": [asdict(curve) for curve in curves]}


def draw_curves(curves: Sequence[LengthCurve]) -> bytes:
    """Return perplexity by the length of the memory as PNG: one line for each model, rings at trained lengths."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(7.2, 4.8)
    axes = figure.subplots()
    for curve in curves:
        points = sorted(curve.points, key=lambda point: point.segments)
        lengths = [point.segments for point in points]
        (line,) = axes.plot(lengths, [point.perplexity for point in points], marker="o", markersize=4)
        line.set_label(f"{curve.title} ({', '.join(curve.mixers)})")
        trained = [point for point in points if point.memory_length in curve.trained]
        axes.plot(
            [point.segments for point in trained], [point.perplexity for point in trained], marker="o", markersize=10,
            markerfacecolor="none", color=line.get_color(), linestyle="none",
        )  # fmt: skip
    add_grid(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"length of the memory in chunks of {curves[0].chunk_size:,} tokens (ring: as trained)")
    axes.set_ylabel("perplexity")
    axes.set_title(f"held-out documents, {curves[0].tokens:,} predicted tokens", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return png(figure)


def length_table(curves: Sequence[LengthCurve]) -> Table:
    """Return a table of loss and perplexity: a line for each model and length."""
    table = Table(title=f"held-out loss by length of the memory, {curves[0].tokens:,} predicted tokens")
    table.add_column("model", overflow="fold")
    for name in ("chunks", "tokens", "loss", "perplexity"):
        table.add_column(name, justify="right")
    for curve in curves:
        table.add_section()
        for point in curve.points:
            length = f"{point.memory_length:,}{' *' if point.memory_length in curve.trained else ''}"
            table.add_row(curve.title, f"{point.segments}", length, f"{point.loss:.4f}", f"{point.perplexity:,.2f}")
    table.caption = "*: as trained"
    return table
