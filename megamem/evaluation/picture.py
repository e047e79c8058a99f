"""The picture of a run: its training curve, and its loss by position in held-out documents."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megamem.evaluation.metrics import Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
_SHOWN_BLOCKS = 48


def draw(result: Mapping[str, Any], curves: Curves, title: str) -> bytes:
    """Return the picture as PNG.

    Args:
        result: as `final_evaluation` returns it.
        curves: training and validation loss; the left panel says so where there are none.
    """
    figure = new_figure(12.8, 5.2)
    left, right = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    _training(left, result, curves)
    _positions(right, result)
    for axes in (left, right):
        add_grid(axes)
        axes.legend(frameon=False, fontsize=9)
    return png(figure)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_grid(axes: Axes) -> None:
    """Draw a grid behind what a panel shows, and no frame above and to the right."""
    axes.grid(True, which="major", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_position_axis(axes: Axes, chunk_size: int) -> None:
    """Finish a panel whose x axis is the position in the document: a log scale, a grid and a legend."""
    from matplotlib.ticker import FuncFormatter

    add_grid(axes)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel(f"position in the document (chunks of {chunk_size:,} tokens)")
    axes.legend(frameon=False, fontsize=9)


def middle(first: int, last: int) -> float:
    """Return the geometric middle of a range of positions: where its mark stands on a log scale."""
    return math.sqrt(first * last)


def png(figure: Figure) -> bytes:
    """Return a figure's PNG."""
    data = io.BytesIO()
    with warnings.catch_warnings():
        # a script that the font lacks is drawn as boxes
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(data, format="png")
    return data.getvalue()


def _training(axes: Axes, result: Mapping[str, Any], curves: Curves) -> None:
    from matplotlib.ticker import EngFormatter

    if curves.training:
        axes.plot(*_columns(curves.training), color=BLUE, linewidth=1.2, alpha=0.85, label="training")
    if curves.validation:
        axes.plot(
            *_columns(curves.validation), color=ORANGE, marker="o", markersize=4, linewidth=1.4, label="validation"
        )
    if not (curves.training or curves.validation):
        axes.text(0.5, 0.6, "no metrics.jsonl", transform=axes.transAxes, ha="center", color=GREY)
    final = result["val_loss"]
    if _finite(final):
        axes.axhline(final, color=ORANGE, linewidth=1.1, linestyle=":", label=f"held-out, final: {final:.3f}")
    lzma_loss = _lzma_loss(result)
    if lzma_loss is not None:
        axes.axhline(lzma_loss, color=GREEN, linewidth=1.1, linestyle="--", label=f"LZMA, same text: {lzma_loss:.3f}")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(_bits(result), fontsize=10)


def _positions(axes: Axes, result: Mapping[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter

    losses, chunk = result["losses"], result["chunk_size"]
    points = [
        (math.sqrt(bucket["first"] * bucket["last"]), bucket["loss"])
        for bucket in losses["by_position"]
        if _finite(bucket["loss"])
    ]
    axes.plot(*_columns(points), color=BLUE, linewidth=1.6, label="by position")
    blocks = _blocks(losses["by_chunk"], chunk)
    axes.plot(*_columns(blocks), color=ORANGE, marker="o", markersize=5, linestyle="none", label="mean of a chunk")
    off = _blocks(result["memory"]["memory_off_by_chunk"], chunk)
    if result["memory"]["gain"] is not None and off != blocks:
        axes.plot(
            *_columns(off), color=GREY, marker="o", markersize=5, markerfacecolor="none", linestyle="none",
            label="mean of a chunk, memory off",
        )  # fmt: skip
    axes.axvline(chunk, color="#4a5568", linewidth=1, linestyle="--", label=f"end of the first chunk ({chunk:,})")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("position in the document (tokens read)")
    axes.set_ylabel("loss (nats per token)")
    _focus(axes, [loss for _, loss in [*points, *blocks, *off]], [loss for _, loss in [*blocks, *off]])
    axes.set_title(f"held-out documents, {losses['tokens']:,} predicted tokens", fontsize=10)


def _blocks(buckets: Sequence[Mapping[str, Any]], chunk: int) -> list[tuple[float, float]]:
    """(geometric middle, mean loss) of chunks; far chunks are merged, so that marks stay apart on a log axis."""
    points: list[tuple[float, float]] = []
    start = 0
    while start < len(buckets):
        stop = min(start + max(1, start // (_SHOWN_BLOCKS // 6)), len(buckets))
        group = [bucket for bucket in buckets[start:stop] if _finite(bucket["loss"])]
        tokens = sum(bucket["tokens"] for bucket in group)
        if tokens:
            loss = sum(bucket["loss"] * bucket["tokens"] for bucket in group) / tokens
            points.append((math.sqrt((start * chunk + 1) * stop * chunk) if start else chunk / 2, loss))
        start = stop
    return points


def _focus(axes: Axes, all_losses: Sequence[float], block_losses: Sequence[float]) -> None:
    """Limit the y axis to about the spread of the chunks: the first few tokens of a document lie far above."""
    if not block_losses:
        return
    low, high = min(all_losses), max(block_losses)
    span = max(high - low, 0.1)
    top = min(max(all_losses), high + 1.5 * span)
    axes.set_ylim(low - 0.1 * span, top + 0.15 * span)


def _lzma_loss(result: Mapping[str, Any]) -> float | None:
    """LZMA's bits per byte in nats per token of the same text."""
    bits, losses = result["lzma_bits_per_byte"], result["losses"]
    if bits is None or losses["text_size"] is None:
        return None
    return float(bits * math.log(2) * losses["text_size"]["bytes"] / losses["tokens"])


def _bits(result: Mapping[str, Any]) -> str:
    names = {"val_bits_per_byte": "model", "lzma_bits_per_byte": "LZMA"}
    parts = [f"{label} {result[name]:.3f}" for name, label in names.items() if result[name] is not None]
    return f"bits per byte of held-out text: {', '.join(parts)}" if parts else ""


def _finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
