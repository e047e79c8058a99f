"""A study's page in a headless browser: its plots are drawn, from the file alone. Needs Debian's `chromium`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.finished_study import finished_study, quick_report

pytestmark = pytest.mark.cluster

BROWSER = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",  # containers have 64 MB of it
)  # fmt: skip
PATIENCE_S = 120


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, folder = quick_report(finished_study(tmp_path_factory.mktemp("study")))
    return folder / "report.html"


def browse(page: Path, profile: Path, *flags: str) -> str:
    """What a fresh browser writes to standard output."""
    words = [*BROWSER, f"--user-data-dir={profile}", "--virtual-time-budget=20000", *flags, page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stdout


def test_every_plot_is_drawn(report: Path, tmp_path: Path) -> None:
    rendered = browse(report, tmp_path / "profile", "--dump-dom")
    written = re.findall(r'<div class="plot" id="plot-([^"]+)">', report.read_text())
    assert len(written) >= 10
    parts = re.split(r'<div class="plot[^"]*" id="plot-', rendered)[1:]
    assert [part.split('"')[0] for part in parts] == written
    for name, part in zip(written, parts, strict=True):
        drawn = part.split("<script")[0]
        assert 'class="main-svg"' in drawn, name
        assert re.search(r'<path class="(js-line|point)', drawn), f"{name}: axes without a curve or point"
    assert 'class="plot error"' not in rendered
    assert 'data-title="Zoom"' in rendered, "buttons beside a plot"
    assert "Share chart" not in re.sub(r"<script.*?</script>", "", rendered, flags=re.DOTALL), "nothing is uploaded"


def test_the_screenshot_shows_it(report: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(report, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1200,6000")
    with Image.open(picture) as image:
        assert image.size == (1200, 6000)
        colors = image.convert("RGB").getcolors(1200 * 6000)
    assert colors is not None
    counts = {color: count for count, color in colors}
    # the first series' color, in lines, marks and bands; text alone has none of it
    assert counts.get((0x2B, 0x6C, 0xB0), 0) > 200
    assert counts.get((255, 255, 255), 0) < 0.99 * 1200 * 6000
