"""The README: its Python does what the text says, its commands parse, its links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run_block(position: int, **names: object) -> dict:
    exec(BLOCKS[position], names)
    return names


def test_every_block_of_python_has_a_test():
    assert len(BLOCKS) == 3


def test_the_three_lines_step_like_fedavg_first_and_lower_the_loss_from_round_to_round():
    targets = np.array([[1.0, 0.0], [3.0, 2.0], [2.0, 4.0]])  # F_k(w) = ‖w - target_k‖²/2
    params, before, state, losses = np.zeros(2), None, None, []
    for number in range(4):
        names = run_block(
            0,
            params=params,
            updates=list(0.2 * (targets - params)),
            gradients=list(params - targets),
            differences=None if before is None else [params - before] * 3,
            state=state,
        )
        before, params, state = params, names["params"], names["state"]
        losses.append(((params - targets) ** 2).sum())
        if number == 0:
            np.testing.assert_allclose(params, 0.2 * targets.mean(axis=0))
    assert losses == sorted(losses, reverse=True)


def test_the_simulation_prints_a_line_a_round_and_learns(capsys):
    record = run_block(1)["record"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(line[0]) for line in lines] == list(range(1, 11))
    assert float(lines[-1][1]) == record.loss < float(lines[0][1])


def test_own_data_model_and_rule_are_trained():
    pytest.importorskip("torch")
    names = run_block(2)
    records = names["trained"].records
    assert names["data"].population == 40
    assert records[-1].loss < records[0].loss
    names["network"]().load_state_dict(names["trained"].params)


def test_the_flower_lines_import_what_there_is():
    flower = pytest.importorskip("fedcontext.flower", reason="the extra 'flower' is not installed")
    added = re.findall(r"^\+from fedcontext.flower import (\w+)", TEXT, re.MULTILINE)
    assert added == ["FedAvg", "torch_client"]
    assert [name for name in added if not callable(getattr(flower, name, None))] == []


def test_links_to_files_lead_to_files():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert len(targets) > 10
    assert [target for target in targets if not (README.parent / target).exists()] == []


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(
    ("given", "figure"),
    [([], "runs/demo/demo.png"), (["FIGURE=docs/figures/demo.png"], "docs/figures/demo.png")],
    ids=["default", "published"],
)
def test_the_demo_replaces_the_published_picture_only_where_asked(given, figure):
    """``runs/`` is not tracked, so that a fresh clone is unchanged after ``make demo``."""
    command = ["make", "--dry-run", "demo", *given]
    printed = subprocess.run(command, cwd=README.parent, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"--figure (\S+)", printed) == [figure]
    assert "runs/" in (README.parent / ".gitignore").read_text("utf-8").splitlines()


def test_the_first_screen_has_install_picture_and_three_lines():
    order = [TEXT.index(part) for part in ("pip install", "docs/figures/demo.png", "```diff", "```python", "arxiv.org")]
    assert order == sorted(order)
    assert TEXT.count("\n") < 155
