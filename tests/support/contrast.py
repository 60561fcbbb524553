"""Contrast of the charts on a page, as WCAG 2 measures it, from what ECharts drew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

LEAST = {"text": 4.5, "shape": 3.0, "token": 3.0}

MEASURE = """async () => {
  const { echarts } = await import("nicegui-echart");
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const found = rgba(getComputedStyle(element).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const luminance = (colour) => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = colour.slice(0, 3).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (colour, opacity, below) => {
    const above = rgba(colour), share = above[3] / 255 * opacity;
    const seen = above.map((c, i) => share * c + (1 - share) * below[i]);
    const [dark, light] = [luminance(seen), luminance(below)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const painted = (colour) => typeof colour === "string" && !["none", "transparent"].includes(colour);
  const found = [];
  for (const element of document.querySelectorAll(".gw-chart, .gw-plot")) {
    const chart = echarts.getInstanceByDom(element), below = ground(element), name = element.ariaLabel;
    if (!chart || !element.clientHeight) continue;
    const add = (kind, colours, opacity) => found.push(
      [name, kind, colours.join(" or "), Math.max(...colours.map((colour) => contrast(colour, opacity, below)))]);
    for (const text of element.querySelectorAll("svg text"))
      add("text", [getComputedStyle(text).fill], 1);
    for (const drawn of chart.getZr().storage.getDisplayList(true)) {
      const { fill, stroke, opacity, lineWidth } = drawn.style, visible = opacity ?? 1;
      if (drawn.invisible || drawn.ignore || String(drawn.anid).startsWith("line_")) continue;  // a line of the grid
      if (drawn.type === "tspan" || drawn.type === "text") {
        if (!element.querySelector("svg") && painted(fill)) add("text", [fill], visible);
        continue;
      }
      const colours = [fill, lineWidth === 0 ? "none" : stroke].filter(painted);
      if (colours.length && visible > 0 && drawn.type !== "rect" || drawn.type === "rect" && painted(fill))
        add("shape", colours, visible);
    }
  }
  const style = getComputedStyle(document.body);
  for (let n = 1; n <= 8; n++)
    found.push(["curves", "token", `--s${n}`, contrast(style.getPropertyValue(`--s${n}`).trim(), 1,
                rgba(style.getPropertyValue("--surface").trim()))]);
  return found;
}"""


@dataclass(frozen=True)
class Measured:
    """A text or shape of a chart.

    Attributes:
        chart: Its name.
        kind: ``"text"``, ``"shape"`` (of its fill and its border the better one), or ``"token"`` for a curve's colour.
        colour: As it was set.
        contrast: Against what is behind the chart, 1 to 21.
    """

    chart: str
    kind: str
    colour: str
    contrast: float

    @property
    def too_low(self) -> bool:
        return self.contrast < LEAST[self.kind]


def chart_contrasts(page: Page) -> list[Measured]:
    """Measure whatever the page's charts show; lines of a grid carry no meaning of their own and are left out."""
    return [Measured(*each) for each in page.evaluate(MEASURE)]
