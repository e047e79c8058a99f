"""A document's chunks, the states of layers, and two stages of a pipeline."""

from docs.figures.svg import BLUE, GREEN, INK, ORANGE, Drawing, lightened

CHUNKS, STAGES, LAYERS = 3, 2, 2
LEFT, TOP, WIDTH, HEIGHT = 100.0, 62.0, 132.0, 56.0
ACROSS, UP = 250.0, 96.0
"""From chunk to chunk, and from stage to stage."""
LEGEND = (
    (ORANGE, "A state stays on its stage and its ranks, split over tensor-parallel ranks by head."),
    (BLUE, "Only hidden chunks go from stage to stage."),
    ("#7d8590", "A stage works on chunk c + 1 while the one above works on chunk c."),
)


def draw() -> str:
    """Return the picture. Stage p works on chunk c at time c + p."""
    bottom = TOP + STAGES * UP
    drawing = Drawing(LEFT + CHUNKS * ACROSS - 16, bottom + 112, "Chunks pass through stages, states stay on them")
    for stage in range(STAGES):
        drawing.text((16, _top(stage) + HEIGHT / 2), f"stage {stage}", anchor="start", bold=True)
    for chunk in range(CHUNKS):
        middle = LEFT + chunk * ACROSS + WIDTH / 2
        drawing.box((middle - 52, 4), (104, 26), "next tokens", lightened(GREEN), INK)
        drawing.arrow([(middle, TOP), (middle, 30)], GREEN)
        drawing.box((middle - 52, bottom), (104, 26), f"chunk {chunk}", GREEN)
        drawing.arrow([(middle, bottom), (middle, bottom - UP + HEIGHT)], GREEN)
        for stage in range(STAGES):
            _layers(drawing, middle, stage, chunk)
    for line, (color, text) in enumerate(LEGEND):
        drawing.text((LEFT, bottom + 54 + 20 * line), text, 12, color, "start")
    return drawing.svg()


def _top(stage: int) -> float:
    return TOP + (STAGES - 1 - stage) * UP


def _layers(drawing: Drawing, middle: float, stage: int, chunk: int) -> None:
    """Draw the layers of a stage as they read a chunk, and the state that they leave to the next one."""
    first, y = stage * LAYERS, _top(stage)
    text = f"layers {first}-{first + LAYERS - 1}\ntime {chunk + stage}"
    drawing.box((middle - WIDTH / 2, y), (WIDTH, HEIGHT), text)
    if stage:
        drawing.arrow([(middle, y + UP), (middle, y + HEIGHT)], BLUE)
    begin, gap, level = middle + WIDTH / 2, ACROSS - WIDTH, y + HEIGHT / 2
    drawing.arrow([(begin, level), (begin + gap / 2 - 28, level)], ORANGE)
    drawing.box((begin + gap / 2 - 28, level - 13), (56, 26), "state", ORANGE, radius=13)
    if chunk < CHUNKS - 1:
        drawing.arrow([(begin + gap / 2 + 28, level), (begin + gap, level)], ORANGE)
