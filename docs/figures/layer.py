"""A memory layer: a chunk and a state in, output and a new state out, its heads on two tensor-parallel ranks."""

from docs.figures.svg import BLUE, GRAY, GREEN, ORANGE, PURPLE, Drawing

RANKS, HEADS = 2, 4
LANE, TOP = 132.0, 8.0
"""Height of a rank's lane, and where the first begins."""
COLUMN, MIX, ROW = (262.0, 104.0), (444.0, 132.0), (652.0, 104.0)
"""Left edge and width of what a lane has."""


def draw() -> str:
    """Return the picture."""
    drawing = Drawing(1010, TOP + RANKS * LANE + 44, "A memory layer on two tensor-parallel ranks")
    middle = TOP + RANKS * LANE / 2
    drawing.box((20, middle - 32), (130, 64), "chunk\n[tokens, batch,\nhidden]", GREEN, font=12)
    drawing.box((860, middle - 32), (130, 64), "output\n[tokens, batch,\nhidden]", GREEN, font=12)
    drawing.arrow([(150, middle), (186, middle)], GREEN)
    drawing.box((186, middle - 58), (34, 116), "", PURPLE)
    drawing.box((798, middle - 58), (34, 116), "", PURPLE)
    drawing.arrow([(832, middle), (860, middle)], GREEN)
    for x, text in ((203, "enter"), (815, "sum")):
        drawing.text((x, middle), text, 11, "#ffffff")
    for rank in range(RANKS):
        _lane(drawing, rank, middle)
    note = "Purple: where ranks communicate, as in every Megatron layer; heads and their states need nothing more."
    drawing.text((505, TOP + RANKS * LANE + 24), note, 12)
    return drawing.svg()


def _lane(drawing: Drawing, rank: int, middle: float) -> None:
    """Draw what one rank does with its heads."""
    top = TOP + rank * LANE
    y = top + LANE - 46  # of the tokens' way; the state's is above
    state = top + 22
    drawing.box((238, top), (542, LANE - 12), "", "none", stroke=GRAY, radius=10)
    drawing.text((250, state - 4), f"rank {rank}", 12, bold=True, anchor="start")
    for left, width, text in (
        (*COLUMN, "column\nq, k, v"),
        (*MIX, f"mix heads {rank * HEADS}-{rank * HEADS + HEADS - 1}"),
        (*ROW, "row\noutput"),
    ):
        drawing.box((left, y - 24), (width, 48), text, BLUE, font=12)
    turn = middle - 20 if rank == 0 else middle + 20
    enters, leaves = 229.0, 789.0
    drawing.arrow([(220, turn), (enters, turn), (enters, y), (COLUMN[0], y)], BLUE)
    drawing.arrow([(sum(COLUMN), y), (MIX[0], y)], BLUE)
    drawing.arrow([(sum(MIX), y), (ROW[0], y)], BLUE)
    drawing.arrow([(sum(ROW), y), (leaves, y), (leaves, turn), (798, turn)], BLUE)
    drawing.box((COLUMN[0] + 48, state - 13), (116, 26), "its heads' state", ORANGE, radius=13, font=12)
    drawing.box((ROW[0] - 40, state - 13), (104, 26), "new state", ORANGE, radius=13, font=12)
    drawing.arrow([(COLUMN[0] + 164, state), (MIX[0] + 44, state), (MIX[0] + 44, y - 24)], ORANGE)
    drawing.arrow([(MIX[0] + 88, y - 24), (MIX[0] + 88, state), (ROW[0] - 40, state)], ORANGE)
