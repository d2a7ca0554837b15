"""Draws headline.svg, the picture of the README, from a table of benchmarks/results/slow_links.md.

python docs/make_headline.py                 # after a new measurement; a test compares the picture with the table
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from svg_plot import Bar, bars  # noqa: E402

PAGE = ROOT / "docs" / "headline.svg"
GREY, BLUE = "#868e96", "#4c6ef5"
ROWS = {
    "ddp": ("torch DDP", GREY),
    "ddp, fp16": ("torch DDP, fp16 hook", GREY),
    "ddp, powersgd 1": ("torch DDP, PowerSGD, rank 1", GREY),
    "allreduce": ("ddp_hooks, no hook", BLUE),
    "int8": ("ddp_hooks, int8", BLUE),
    "local SGD 16": ("ddp_hooks, local SGD", BLUE),
    "powersgd 4, at once": ("ddp_hooks, PowerSGD, rank 4", BLUE),
}


def headline(_: str = "") -> str:
    """Return the picture: seconds to the same loss, by way of communicating."""
    text = (ROOT / "benchmarks" / "results" / "slow_links.md").read_text()
    table = text.split("**lm, 4 hosts at 100mbit**", 1)[1].split("\n\n", 2)[1]
    seconds = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[\d.]+", cells[5]):
            seconds[cells[0]] = float(cells[5])
    first = seconds["ddp"]
    rows = [Bar(label, seconds[row], colour, f"{first / seconds[row]:.1f}x") for row, (label, colour) in ROWS.items()]
    title = "Seconds to the same loss: transformer, four hosts, 100 Mbit/s"
    panel, height = bars(title, rows, "s", width=640, label_width=210)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 660 {height + 20:.0f}' "
        "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'>"
        f"<rect width='100%' height='100%' fill='white'/><g transform='translate(10,10)'>{panel}</g></svg>\n"
    )


if __name__ == "__main__":
    PAGE.write_text(headline())
