"""The pictures of the documentation that code draws: `make docs` writes them to docs/pictures/."""

from collections.abc import Callable

from docs.figures import chunks, layer, recurrent_memory, schedules

FIGURES: dict[str, Callable[[], str]] = {
    "chunks": chunks.draw,
    "layer": layer.draw,
    "schedule": schedules.plain,
    "schedule_interleaved": schedules.interleaved,
    "recurrent_memory_rows": recurrent_memory.draw,
}
"""By name of the file, `.svg` left out."""
