"""The deployment script says what went wrong, and ends what it started."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from local_federation import Federation, show

from fedcontext import records


@pytest.fixture
def local(tmp_path: Path) -> Federation:
    made = Federation(tmp_path)
    (tmp_path / "run.log").write_text("the reason\n")
    return made


def write(local: Federation, rounds: int, loss: float | None) -> None:
    numbers = {"promised_change": None, "measured_change": None, "smoothness": None, "curvature": None}
    sizes = {"condition": None, "seconds": 0.0, "bytes_down": 0, "bytes_up": 0}
    done = [records.RoundRecord(n, loss, loss, [4], [0.5], **numbers, **sizes) for n in range(1, rounds + 1)]
    with (local.at / "run.jsonl").open("w") as file:
        list(records.stream_records({}, done, file))


def test_rounds_are_shown_also_where_nothing_was_evaluated(local: Federation, capsys) -> None:
    write(local, 2, None)
    show(local, 2)
    assert capsys.readouterr().out.splitlines()[1] == "round 2: loss unknown, accuracy unknown, weights {4: 0.500}"


@pytest.mark.parametrize("done", [None, 0, 1])
def test_fewer_rounds_than_asked_for_end_with_the_log(local: Federation, done: int | None) -> None:
    if done:
        write(local, done, 0.25)
    elif done == 0:
        (local.at / "run.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        show(local, 2)
    assert str(ended.value).startswith("the reason\n")
    assert f"{done or 0} of 2 rounds were completed" in str(ended.value)


def test_one_process_that_cannot_be_ended_does_not_keep_the_others_running(local: Federation, monkeypatch) -> None:
    sleepers = [local.start(f"sleeper{number}", str(shutil.which("sleep")), "60") for number in range(2)]
    stop = Federation.stop

    def stuck(self: Federation, process: subprocess.Popen) -> None:
        stop(self, process)
        if process is sleepers[0]:
            raise RuntimeError("it is still there")

    monkeypatch.setattr(Federation, "stop", stuck)
    with pytest.raises(ExceptionGroup, match="some processes could not be stopped") as raised:
        local.stop_all()
    assert len(raised.value.exceptions) == 1
    assert all(sleeper.poll() is not None for sleeper in sleepers)
