"""The paper's experiments: complete, sharing runs, with claims checked from records alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import fedcontext as fc
from fedcontext.measurement.defences import OFF
from fedcontext.paper import document
from fedcontext.paper.claims import check_claims
from fedcontext.paper.experiments import SEEDS, STUDIES, experiments_of, get_study
from fedcontext.paper.figures import curve, new_figure, stages
from fedcontext.paper.reproduce import draw_figures, read_records, run_experiments
from fedcontext.runner import missing_experiments


def test_the_experiments_are_the_papers():
    variants = experiments_of(get_study("variants").series)
    assert {run.probes for run in variants} == {"all", 50, 20, 10, "cohort"}
    assert {run.dataset for run in variants} == {"mnist"}
    rounds = experiments_of(get_study("rounds").series)
    assert {run.dataset for run in rounds} == {"mnist", "femnist", "synthetic-iid", "synthetic-1-1"}
    experiments = [run for study in STUDIES.values() for run in experiments_of(study.series)]
    assert all(run.devices_per_round == 10 and run.epochs == (1, 20) for run in experiments)
    assert {run.seed for run in experiments} == set(SEEDS)
    assert {run.defences for run in experiments} == {OFF}
    assert len(SEEDS) >= 3
    assert {"mean", "samples"} == {run.averaging for run in experiments}
    assert {"1/lr", "measured"} == {run.smoothness for run in experiments}


def synthetic_study(name):
    """The study with every data set replaced by a generated one, so that it needs no files."""
    study = get_study(name)
    series = [
        dataclasses.replace(each, settings=tuple(dict(each.settings, dataset="synthetic-iid").items()))
        for each in study.quick_series()
        if each.panel in ("μ = 0.1", "MNIST") and each.label != "K2 = 50"  # there are 30 devices
    ]
    return dataclasses.replace(study, series=tuple(series))


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_once_and_draws_its_figures(tmp_path, name):
    study = synthetic_study(name)
    todo = missing_experiments(experiments_of(study.series, quick=True), tmp_path)
    assert todo
    run_experiments(todo, tmp_path, 1, lambda experiment, record: None)
    assert missing_experiments(experiments_of(study.series, quick=True), tmp_path) == []
    figures = draw_figures(study, read_records(study.series, tmp_path, quick=True), tmp_path / "figures")
    assert figures
    for path in figures:
        assert path.read_bytes()[1:4] == b"PNG"
        assert path.with_suffix(".pdf").read_bytes()[:4] == b"%PDF"


@pytest.mark.parametrize("rounds", [1, 2, 3, 60])
def test_no_tick_of_a_figure_is_at_a_fraction_of_a_round(rounds):
    _, ((axis,),) = new_figure(1, 1, width=5, height=3)
    curve(axis, 0, "fedavg", [[fc.RoundRecord(n + 1, 0.5, 0.5) for n in range(rounds)]], "loss")
    assert len(axis.get_xticks()) > 0
    assert all(float(tick).is_integer() for tick in axis.get_xticks())


def test_records_of_another_engine_are_accepted_and_those_of_the_one_asked_for_preferred(tmp_path):
    study = synthetic_study("weights")
    runs = experiments_of(study.series, quick=True)
    other = [dataclasses.replace(run, engine="reference") for run in runs]
    assert all(run.engine == "numba" for run in runs)
    run_experiments(other, tmp_path, 1, lambda experiment, record: None)
    assert missing_experiments(experiments_of(study.series, quick=True), tmp_path) == []
    (records, *_) = next(iter(read_records(study.series, tmp_path, quick=True).values()))
    assert records == fc.read_run(tmp_path / f"{other[0].name}.jsonl")[1]
    run_experiments(runs, tmp_path, 1, lambda experiment, record: None)
    (records, *_) = next(iter(read_records(study.series, tmp_path, quick=True).values()))
    assert records == fc.read_run(tmp_path / f"{runs[0].name}.jsonl")[1]
    (tmp_path / f"{runs[0].name}.jsonl").unlink()
    (tmp_path / f"{other[0].name}.jsonl").unlink()
    assert missing_experiments(experiments_of(study.series, quick=True), tmp_path) == [runs[0]]


@pytest.mark.parametrize("losses", [[6, 5, 4, 3, 2, 1], [3, 1, 1], [9, 2, 1, 1, 1, 1], [1, 2, 3, 4], [5, 5, 5]])
def test_the_three_stages_of_a_run_are_three_rounds(losses):
    run = [
        fc.RoundRecord(n, loss, 0.5, [0], [1.0], None, None, None, None, None, 1.0, 1, 1)
        for n, loss in enumerate(losses, 1)
    ]
    shown = [record.number for record in stages(run).values()]
    assert shown == sorted(set(shown))
    assert (shown[0], shown[-1]) == (1, len(run))


def made_up_records(contextual_loss, other_loss):
    """Records in which the contextual versions have one loss throughout, and all else another."""

    def run(each):
        loss = contextual_loss if "contextual" in dict(each.settings)["algorithm"] else other_loss
        return [
            fc.RoundRecord(n, loss, 1 - loss / 2, [0, 1], [0.5, 0.1 * n], -0.1, -0.01, 1.0, 1.0, 1.0, 1.0, 1, 1)
            for n in range(1, 25)
        ]

    return {each: [run(each) for _ in SEEDS] for study in STUDIES.values() for each in study.series}


def test_claims_are_checked_from_the_records():
    good = {claim.text: claim.verdict for claim in check_claims(made_up_records(0.2, 1.2))}
    bad = {claim.text: claim.verdict for claim in check_claims(made_up_records(1.2, 0.2))}
    better = "the contextual versions are always better than FedAvg, FedProx and FOLB: lower loss, higher accuracy"
    assert (good[better], bad[better]) == ("holds", "does not hold")
    faster = "MNIST: 3 times fewer rounds than FedAvg and FedProx at every accuracy level"
    assert (good[faster], bad[faster]) == ("holds", "does not hold")
    assert good["contextual aggregation reduces the loss in every round"] == "holds"
    assert bad["FOLB is better than FedAvg and FedProx in individual rounds"] == "does not hold"


def test_the_document_has_every_claim_with_its_numbers(tmp_path, monkeypatch):
    index = made_up_records(0.2, 1.2)
    monkeypatch.setattr(document, "read_records", lambda series, out, quick: index)
    monkeypatch.setattr(document, "draw_figures", lambda study, index, folder: [])
    text = document.write_document(tmp_path, tmp_path / "docs").read_text()
    for claim in check_claims(index):
        assert claim.text in text
        assert all(check.numbers in text for check in claim.checks)
    assert np.all([f"reproduce {name}" in text for name in STUDIES])
