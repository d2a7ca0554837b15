"""The Python in README and docs runs: each page's blocks, one after the other, as a reader would paste them.

Fragments that need a run around them are marked ``py`` in the pages instead of ``python``, and are not run here.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_ddp_hooks import DDPHooksStrategy, averaging, callbacks, hooks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(page: Path) -> list[str]:
    """Return the page's Python blocks, also those indented in a list."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def _names() -> dict[str, Any]:
    """Return what the pages take for granted."""
    return {
        "Trainer": Trainer,
        "DDPHooksStrategy": DDPHooksStrategy,
        "averaging": averaging,
        "callbacks": callbacks,
        "hooks": hooks,
        "my_state": None,
        "my_function": lambda state, bucket: bucket.buffer(),
        "model": nn.Linear(2, 2),
        "torch": torch,
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path) -> None:
    names = _names()
    for block in _blocks(page):
        exec(compile(block, str(page), "exec"), names)


def test_the_pages_have_code() -> None:
    assert sum(len(_blocks(page)) for page in PAGES) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target
