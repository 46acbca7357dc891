"""The README's Python runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_examples_run(block):
    names = {"params": np.zeros(3), "updates": [np.ones(3), np.arange(3.0)], "g": -np.ones(3), "lr": 0.1}
    exec(block, names)
    assert "fc" in names


def test_there_are_examples():
    assert len(BLOCKS) >= 3
