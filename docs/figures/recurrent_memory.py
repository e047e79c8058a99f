"""The rows around a chunk that the layers of a Recurrent Memory Transformer read, in both forms."""

from __future__ import annotations

from docs.figures.svg import BLUE, GREEN, INK, ORANGE, PURPLE, Drawing, lightened
from megamem.config.model import ModelConfig
from megamem.model.architectures.recurrent_memory import RecurrentMemoryConfig

TOKENS = 4
SIZE, STEP = 34.0, 38.0
"""Side of a row's box, and from box to box."""
HEIGHT, TOP = 196.0, 20.0
"""Of a form, and above it."""


def draw() -> str:
    """Return the picture: two chunks in each form."""
    forms = (
        ("read_write", RecurrentMemoryConfig(memory_tokens=2, form="read_write")),
        ("overwrite", RecurrentMemoryConfig(memory_tokens=1, form="overwrite")),
    )
    drawing = Drawing(940, TOP + len(forms) * HEIGHT + 8, "Memory rows before and behind the tokens of a chunk")
    for index, (name, config) in enumerate(forms):
        top = TOP + index * HEIGHT
        drawing.text((20, top + 66), name, 13, bold=True, anchor="start")
        ends = [_chunk(drawing, config, chunk, 150 + chunk * 400, top) for chunk in range(2)]
        _carry(drawing, config, ends[0], 150 + 400, top)
    return drawing.svg()


def rows(config: RecurrentMemoryConfig, chunk: int) -> list[tuple[str, str]]:
    """Return label and color of each row that layers read of a chunk."""
    model = ModelConfig(layers=1, hidden_size=8, heads=2, chunk_size=TOKENS, architecture=config)
    first = chunk * TOKENS
    memory = [(f"m{i}" if config.memory_tokens > 1 else "m", ORANGE) for i in range(config.rows_before)]
    unread = config.unread_places(model)
    tokens = [("m", ORANGE) if i in unread else (f"t{first + i}", GREEN) for i in range(TOKENS)]
    behind = [(f"w{i}", PURPLE) for i in range(config.rows_behind)]
    found = memory + tokens + behind
    assert len(found) == config.layer_part(model, 0).model.chunk_size
    return found


def _chunk(drawing: Drawing, config: RecurrentMemoryConfig, chunk: int, left: float, top: float) -> float:
    """Draw rows, layers and what they give; return where the rows end."""
    read = rows(config, chunk)
    width = len(read) * STEP - (STEP - SIZE)
    drawing.box((left, top + 50), (width, 32), f"layers, chunk {chunk}", BLUE)
    for place, (label, color) in enumerate(read):
        x = left + place * STEP
        drawing.box((x, top + 112), (SIZE, SIZE), label, color, font=12, radius=4)
        drawing.arrow([(x + SIZE / 2, top + 112), (x + SIZE / 2, top + 82)], color)
        token = place - config.rows_before
        if 0 <= token < TOKENS:
            drawing.box(
                (x, top), (SIZE, 24), f"t{chunk * TOKENS + token + 1}", lightened(GREEN), INK, font=12, radius=4
            )
            drawing.arrow([(x + SIZE / 2, top + 50), (x + SIZE / 2, top + 24)], GREEN)
        elif token >= TOKENS:
            drawing.box((x, top), (SIZE, 24), f"m{token - TOKENS}", ORANGE, font=12, radius=4)
            drawing.arrow([(x + SIZE / 2, top + 50), (x + SIZE / 2, top + 24)], ORANGE)
    return left + width


def _carry(drawing: Drawing, config: RecurrentMemoryConfig, end: float, after: float, top: float) -> None:
    """Draw the memory's way from the last rows that a chunk gives to the first that the next one reads."""
    level, turn = top + 166, end + 16
    into = after + (config.memory_tokens * STEP - (STEP - SIZE)) / 2
    drawing.arrow([(end, top + 12), (turn, top + 12), (turn, level), (into, level), (into, top + 112 + SIZE)], ORANGE)
    drawing.text((turn - 10, level), "memory_tokens, to the next chunk", 12, ORANGE, "end")
