"""What the pages show runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import fedcontext as fc

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_hand_written_loop_goes_where_the_devices_agree() -> None:
    space: dict = {}
    exec(blocks("plug-in.md")[0], space)
    start = np.linalg.norm(space["targets"].mean(axis=0))
    assert np.linalg.norm(space["w"] - space["targets"].mean(axis=0)) < start


def test_the_loop_with_a_second_exchange_ends_at_the_minimum() -> None:
    space: dict = {}
    exec(blocks("plug-in.md")[1], space)
    np.testing.assert_allclose(space["w"], np.mean(list(space["minima"].values()), axis=0), atol=0.02)


def test_the_pytorch_loop_trains_its_network() -> None:
    space: dict = {}
    exec(blocks("plug-in.md")[2], space)
    assert space["final"] < 0.1  # 1.1 at first


def test_updates_in_files_are_aggregated_into_the_file_of_the_params(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    exec(blocks("plug-in.md")[3], space)
    updates = [np.load(f"update-{k}.npy") for k in range(3)]
    whole = fc.aggregate(
        np.zeros(1_000, np.float32), updates, gradient=np.load("gradient.npy"), rule=fc.contextual(2.0)
    )
    assert isinstance(space["result"].params, np.memmap)
    np.testing.assert_array_equal(np.load("params.npy"), whole.params)
    assert whole.params.any()


def test_the_loop_that_folds_updates_in_goes_where_the_devices_agree() -> None:
    space: dict = {}
    exec(blocks("plug-in.md")[4], space)
    middle = space["targets"].mean(axis=0)
    assert np.linalg.norm(space["w"]["weights"] - middle) < 0.1 * np.linalg.norm(middle)


def test_sketches_keep_most_of_the_promise() -> None:
    space: dict = {}
    exec(blocks("privacy.md")[0], space)
    assert 0.8 < space["kept"] <= 1
    assert np.isclose(
        fc.bound(space["exact"].geometry, space["weights"], 1.0),
        space["step"] @ space["gradient"] + space["step"] @ space["step"] / 2,
    )


def test_flares_controller_reaches_the_same_model_as_the_loop() -> None:
    flare = pytest.importorskip("nvflare.app_common.abstract.fl_model", reason="nvflare is not installed")
    space: dict = {}
    exec(blocks("plug-in.md")[5], space)
    targets = {"site-1": np.ones(2), "site-2": -3 * np.ones(2), "site-3": np.array([2.0, 0.0])}

    class Local(space["Contextual"]):
        saved = None

        def load_model(self):
            return flare.FLModel(params={"w": np.zeros(2)})

        def sample_clients(self, num_clients=None):
            return list(targets)[:num_clients]

        def send_model_and_wait(self, task_name, data, targets_, min_responses, timeout):
            pulls = {name: data.params["w"] - targets[name] for name in targets_}
            sign = 1 if task_name == "gradient" else -0.5
            kind = flare.ParamsType.FULL if task_name == "gradient" else flare.ParamsType.DIFF
            return [
                flare.FLModel(kind, params={"w": sign * pull}, meta={"client_name": name})
                for name, pull in pulls.items()
            ]

        def info(self, msg):
            assert "weights" in msg

        def save_model(self, model):
            self.saved = model

    controller = Local(smoothness=1.0)
    controller.run()
    w = np.zeros(2)
    for _ in range(3):
        pulls = [w - target for target in targets.values()]
        moves = [-0.5 * pull for pull in pulls[:2]]
        w = fc.aggregate(w, moves, gradients=pulls, rule=fc.contextual(1.0)).params
    np.testing.assert_allclose(controller.saved.params["w"], w)
