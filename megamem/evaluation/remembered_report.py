"""What a memory helps to predict, for people: two tables, a picture, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from megamem.evaluation.comparison import Estimate
from megamem.evaluation.comparison_report import shown_estimate
from megamem.evaluation.picture import BLUE, GREY, add_grid, new_figure, png
from megamem.evaluation.remembered import Example, RememberedReport
from megamem.evaluation.report import write_new

if TYPE_CHECKING:
    from rich.console import RenderableType

NUMBERS, PICTURE = "remembered.json", "remembered.png"
SHOWN_CHARACTERS = 60
"""Characters of the text before a token that a table shows at most."""


def write_remembered(folder: Path, found: RememberedReport) -> None:
    """Write the numbers and the picture into a new folder. Raises DataError for one that is there or not writable."""
    write_new(folder, NUMBERS, found.to_dict(), {PICTURE: draw_remembered(found)})


def remembered_tables(found: RememberedReport) -> list[RenderableType]:
    """Return a table of gains by how long ago a token was last read, and one of examples."""
    gains = Table(
        title="What the memory gives, by where the predicted token was last read",
        caption=f"nats per token beyond the first chunk; standard errors over {found.documents:,} documents",
    )
    gains.add_column("last read, tokens ago", no_wrap=True)
    for name in ("tokens", "loss", "memory off", "gain"):
        gains.add_column(name, justify="right", no_wrap=True)
    for group in found.groups:
        if group is found.groups[-1]:
            gains.add_section()
        gains.add_row(
            group.last_read, f"{group.tokens:,}", f"{group.loss:.3f}", f"{group.memory_off_loss:.3f}",
            shown_estimate(Estimate(group.gain, group.stderr)),
        )  # fmt: skip
    if not found.examples:
        return [gains]
    examples = Table(
        title="Where it gives most: words that were read before the chunk",
        caption="the text before is all of the chunk that a model without a memory sees, or its end",
    )
    examples.add_column("text before, and the word")
    for name in ("probability", "memory off", "last read"):
        examples.add_column(name, justify="right")
    for example in found.examples:
        examples.add_row(
            _shown(example), f"{example.probability:.2%}", f"{example.memory_off_probability:.2%}",
            f"{example.distance:,} ago",
        )  # fmt: skip
    return [gains, examples]


def _shown(example: Example) -> Text:
    """Write the text before a token in one line, and the token in bold."""
    before = example.before.replace("\n", " ")
    cut = before if len(before) <= SHOWN_CHARACTERS else f"…{before[-SHOWN_CHARACTERS:]}"
    return Text.assemble(cut, (example.token, "bold"))


def draw_remembered(found: RememberedReport) -> bytes:
    """Return the picture as PNG: a bar with its standard error for each group."""
    figure = new_figure(8.4, 4.2)
    axes = figure.subplots()
    labels = [f"{group.last_read}\n({group.tokens:,} tokens)" for group in found.groups]
    colors = [*([BLUE] * (len(labels) - 1)), GREY]
    axes.barh(
        labels[::-1], [group.gain for group in found.groups][::-1],
        xerr=[group.stderr or 0.0 for group in found.groups][::-1], color=colors[::-1], height=0.6,
    )  # fmt: skip
    axes.axvline(0, color="#4a5568", linewidth=1)
    axes.set_xlabel("what the memory gives (nats per token)")
    axes.set_title("by where the predicted token was last read", fontsize=11)
    add_grid(axes)
    return png(figure)
