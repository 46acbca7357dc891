"""The page in a real browser. Screenshots are kept in build/screenshots."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcontext.cli.app import app
from fedcontext.paper import experiments, reproduce
from fedcontext.paper.experiments import DATASETS
from fedcontext.report import write_report

from .conftest import ALGORITHMS

CHARTS = [
    "loss",
    "accuracy",
    "milestones",
    "heatmap",
    "stage-0",
    "stage-1",
    "stage-2",
    "bound",
    "condition",
    "smoothness",
]
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
DRAWN = "id => document.querySelectorAll(`#${id} .cartesianlayer path, #${id} .cartesianlayer image`).length"
LINES = "() => document.querySelectorAll('#loss .scatterlayer .js-line').length"
HOSTILE = "</script><script>alert(1)</script>\"'&<b>%{x}</b>"


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report with spaces.html"
    write_report([runs], out)
    return out


def settled(page) -> None:
    page.wait_for_timeout(20)
    page.wait_for_selector("body[data-drawn=yes]", timeout=30_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_every_chart_is_drawn_and_nothing_scrolls_sideways(open_page, report: Path, width: int, scheme: str) -> None:
    page = open_page(report, width, scheme)
    assert {chart: page.evaluate(DRAWN, chart) for chart in CHARTS if not page.evaluate(DRAWN, chart)} == {}
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"report-{width}-{scheme}.png", full_page=True)


@pytest.fixture(scope="module")
def paper_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of what `fedcontext reproduce rounds --quick` writes, in half as many rounds and with two seeds."""
    folder = tmp_path_factory.mktemp("paper")
    commands = ["reproduce rounds --quick --out runs --jobs 1 --quiet", "report runs -o report.html"]
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "QUICK_ROUNDS", 3)
        for module in (experiments, reproduce):
            patch.setattr(module, "SEEDS", (0, 1))
        for command in commands:
            done = CliRunner().invoke(app, command.split())
            assert done.exit_code == 0, done.output
    return folder / "report.html"


def of_the_paper(test):
    """Mark a test that needs the report of the paper's rounds: it is made once, in one process."""
    for mark in (pytest.mark.slow, pytest.mark.data("mnist", "femnist"), pytest.mark.xdist_group("paper report")):
        test = mark(test)
    return test


@of_the_paper
@pytest.mark.parametrize(("width", "scheme", "other"), [(1400, "light", "dark"), (390, "dark", "light")])
def test_the_papers_rounds_are_drawn_on_every_data_set(
    open_page, paper_report: Path, width: int, scheme: str, other: str
) -> None:
    page = open_page(paper_report, width, scheme)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for dataset in reversed(DATASETS.values()):
        page.get_by_label("Data set").select_option(dataset)
        settled(page)
        assert f"on {dataset}:" in page.locator("#headline").inner_text()
        assert {chart: page.evaluate(DRAWN, chart) for chart in CHARTS if not page.evaluate(DRAWN, chart)} == {}
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=SCREENSHOTS / f"rounds-{dataset}-{width}-{scheme}.png", full_page=True)
    page.get_by_role("button", name="Switch between light and dark").click()
    settled(page)
    assert page.evaluate("document.documentElement.dataset.theme") == other
    page.screenshot(path=SCREENSHOTS / f"rounds-mnist-{width}-{other}.png", full_page=True)


@of_the_paper
def test_the_papers_page_can_be_worked_with(open_page, paper_report: Path) -> None:
    page = open_page(paper_report)
    labels = page.locator("#legend button").all_inner_texts()
    assert {"fedavg", "fedavg-contextual (probes=cohort)", "fedavg-contextual (probes=all)"} <= set(labels)
    page.get_by_label("bytes", exact=True).check(force=True)
    page.get_by_role("button", name="folb").click()
    settled(page)
    assert page.evaluate("document.querySelector('#loss .xtitle').textContent").startswith("bytes")
    assert page.evaluate("document.getElementById('milestones').data.length") == len(labels) - 1
    page.get_by_role("button", name="final accuracy").click()
    accuracies = [float(text.split()[0]) for text in page.locator("#results tbody td:nth-child(3)").all_inner_texts()]
    assert accuracies == sorted(accuracies)
    page.get_by_label("Baseline").select_option("fedavg-contextual (probes=all)")
    assert page.locator("tr.baseline th").inner_text() == "fedavg-contextual (probes=all)"
    assert set(page.locator("tr.baseline small").all_inner_texts()) == {"1.00×"}


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False], ids=["5 lines", "50 lines"])
def test_fifty_runs_of_a_thousand_rounds_can_be_drawn_and_panned(
    open_page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from report_large import write_runs

    write_runs(tmp_path, 50, 1000, together)
    write_report([tmp_path], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert {chart: page.evaluate(DRAWN, chart) for chart in CHARTS if not page.evaluate(DRAWN, chart)} == {}
    assert page.evaluate(LINES) >= (5 if together else 50)
    page.evaluate("Plotly.relayout('loss', {dragmode: 'pan'})")
    where = "() => document.getElementById('loss').layout.xaxis.range.map(Number)"
    low, high = page.evaluate(where)
    page.locator("#loss").scroll_into_view_if_needed()
    box = page.locator("#loss .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2, steps=10)
    page.mouse.up()
    page.wait_for_function(f"low => ({where})()[0] > low", arg=low, timeout=30_000)
    panned = page.evaluate(where)
    assert panned[1] - panned[0] == pytest.approx(high - low)


def test_words_and_tables_are_painted_before_plotly_starts(open_page, report: Path) -> None:
    script = """let frames = 0;
    const count = () => { frames += Boolean(document.querySelector('#results tbody tr')); requestAnimationFrame(count); };
    requestAnimationFrame(count);
    Object.defineProperty(window, 'Plotly', {configurable: true, set(value) {
      window.before = frames;
      Object.defineProperty(window, 'Plotly', {value, writable: true});
    }});"""
    page = open_page(report, script=script)
    assert page.evaluate("window.before") > 0


def test_no_task_draws_twice(open_page, report: Path) -> None:
    script = """window.draws = []; let task = 0;
    Object.defineProperty(window, 'Plotly', {configurable: true, set(value) {
      Object.defineProperty(window, 'Plotly', {value: {...value, react(box, ...rest) {
        window.draws.push([box.id, task]);
        setTimeout(() => { task += 1; });
        return value.react(box, ...rest);
      }}});
    }});"""
    draws = open_page(report, script=script).evaluate("window.draws")
    assert {box for box, _ in draws} == set(CHARTS)
    tasks = [task for _, task in draws]
    assert len(tasks) == len(set(tasks))


def test_the_axis_switch_changes_charts_and_table(open_page, report: Path) -> None:
    page = open_page(report)
    title = "() => document.querySelector('#loss .xtitle').textContent"
    assert page.evaluate(title) == "round"
    page.get_by_label("seconds", exact=True).check(force=True)
    settled(page)
    assert page.evaluate(title) == "seconds"
    assert " s" in page.locator("#results tbody").inner_text()
    page.get_by_label("bytes", exact=True).check(force=True)
    settled(page)
    assert "bytes" in page.evaluate(title)
    costs = page.locator("#results tbody td:nth-child(n+7)").all_inner_texts()  # behind the plain columns
    assert any(re.match(r"[\d.,]+ [kMGTP]?B", text) for text in costs)
    assert all(re.match(r"[\d.,]+ [kMGTP]?B|–$", text) for text in costs)


def test_a_legend_entry_hides_its_line_everywhere_and_brings_it_back(open_page, report: Path) -> None:
    page = open_page(report)
    before = page.evaluate(LINES)
    entry = page.get_by_role("button", name="folb")
    entry.click()
    settled(page)
    assert entry.get_attribute("aria-pressed") == "false"
    assert page.evaluate(LINES) < before
    assert page.evaluate("() => Plotly && document.getElementById('milestones').data.length") == len(ALGORITHMS) - 1
    entry.focus()
    page.keyboard.press("Enter")
    settled(page)
    assert page.evaluate(LINES) == before


def test_a_run_without_evaluation_says_so_and_what_to_do(open_page, write_run, tmp_path: Path) -> None:
    write_report([write_run([{"number": 1, "devices": [3], "weights": [1.0]}])], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    for measure in ("loss", "accuracy"):
        assert page.locator(f"#{measure}").inner_text().startswith(f"No {measure} is recorded: evaluate the model")


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], [7, 8, 9]], ids=str)
def test_no_tick_is_at_a_fraction_of_a_round(open_page, write_run, tmp_path: Path, numbers: list[int]) -> None:
    known = ("loss", "accuracy", "promised_change", "measured_change", "condition", "smoothness", "curvature")
    rounds = [{"number": n, "devices": [3], "weights": [1.0], **dict.fromkeys(known, 0.5)} for n in numbers]
    write_report([write_run(rounds)], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    for chart in ("loss", "accuracy", "heatmap", "bound", "condition", "smoothness"):
        ticks = page.locator(f"#{chart} .xtick text").all_text_contents()
        assert set(map(str, numbers)) <= set(ticks)
        assert all(text.isdecimal() for text in ticks)


def test_no_toolbar_covers_the_charts_where_nothing_can_hover(chromium, report: Path) -> None:
    with chromium.new_context(has_touch=True, is_mobile=True) as phone:
        page = phone.new_page()
        page.goto(report.as_uri())
        page.wait_for_selector("body[data-drawn=yes]", timeout=30_000)
        assert page.locator(".modebar-btn").count() == 0


def test_the_table_sorts_by_any_column_both_ways(open_page, report: Path) -> None:
    page = open_page(report)
    losses = lambda: [float(text) for text in page.locator("#results tbody td:nth-child(2)").all_inner_texts()]  # noqa: E731
    header = page.get_by_role("button", name="final loss")
    header.click()
    assert losses() == sorted(losses())
    page.get_by_role("button", name="final loss").press("Enter")
    assert losses() == sorted(losses(), reverse=True)
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("final loss")


def test_ratios_are_to_the_baseline_chosen(open_page, report: Path) -> None:
    page = open_page(report)
    for label in ALGORITHMS:
        page.get_by_label("Baseline").select_option(label)
        row = page.locator("tr.baseline")
        assert row.locator("th").inner_text() == label
        assert set(row.locator("small").all_inner_texts()) <= {"1.00×"}
    assert page.locator("#results small").count() > 0


def test_dark_and_light_change_page_and_charts(open_page, report: Path) -> None:
    page = open_page(report)
    colours = (
        "() => [getComputedStyle(document.body).backgroundColor, document.getElementById('loss').layout.font.color]"
    )
    light = page.evaluate(colours)
    page.get_by_role("button", name="Switch between light and dark").click()
    settled(page)
    dark = page.evaluate(colours)
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_log_scale_and_another_run(open_page, report: Path) -> None:
    page = open_page(report)
    page.get_by_label("log loss").check()
    settled(page)
    assert page.evaluate("document.getElementById('loss').layout.yaxis.type") == "log"
    page.locator("#run").select_option("fedavg, seed 1")
    settled(page)
    assert "no bound" in page.locator("#bound-note").inner_text()
    assert page.locator("#excluded tbody tr").count() > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken(open_page, report: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = open_page(report, scheme=scheme)
    result = axe.Axe().run(page)
    assert result.violations_count == 0, result.generate_report()


def test_the_settings_can_be_copied(open_page, report: Path) -> None:
    page = open_page(report)
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert "synthetic-1-1" in page.evaluate("navigator.clipboard.readText()")


def test_the_layout_does_not_jump_when_charts_arrive(open_page, report: Path) -> None:
    page = open_page(report)
    shifts = """() => new Promise(done => new PerformanceObserver(list => done(list.getEntries()
      .reduce((sum, entry) => sum + entry.value, 0))).observe({type: 'layout-shift', buffered: true}) || setTimeout(() => done(0), 500))"""
    assert page.evaluate(shifts) < 0.1


def test_the_page_prints(open_page, report: Path) -> None:
    page = open_page(report, scheme="dark")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    text = page.pdf(path=SCREENSHOTS / "report.pdf", format="A4", print_background=True)
    assert text.startswith(b"%PDF")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_that_is_printed_at_once_has_every_chart(open_page, report: Path, scheme: str) -> None:
    script = """addEventListener('DOMContentLoaded', () => {
      dispatchEvent(new Event('beforeprint'));
      const widths = [...document.querySelectorAll('.chart .main-svg:first-child')].map(svg => svg.clientWidth);
      window.printed = {theme: document.documentElement.dataset.theme, widths, lines: (LINES)()};
      dispatchEvent(new Event('afterprint'));
    });""".replace("LINES", LINES)
    page = open_page(report, scheme=scheme, script=script)
    printed = page.evaluate("window.printed")
    assert printed["theme"] == "light"
    assert len(printed["widths"]) == len(CHARTS)
    assert max(printed["widths"]) <= 680
    assert printed["lines"] == page.evaluate(LINES)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert {chart: page.evaluate(DRAWN, chart) for chart in CHARTS if not page.evaluate(DRAWN, chart)} == {}


@pytest.mark.parametrize("unit", ["rounds", "seconds"])
def test_hostile_records_give_a_whole_page_of_plain_text(open_page, write_run, tmp_path: Path, unit: str) -> None:
    rounds = [
        {"loss": 1e300, "accuracy": 0.5, "devices": [HOSTILE, 2], "weights": [0.5], "excluded": {HOSTILE: HOSTILE}},
        '{"number": 2, "loss": NaN, "accuracy": Infinity, "weights": "no"}',
        {"number": -4, "loss": "1", "devices": 3, "excluded": [], "seconds": -1e99},
        {"loss": 2.0, "accuracy": 0.7, "seconds": 1e99, "devices": ["$x^2$", "a" * 300], "weights": [1e99, -1e99]},
        {"promised_change": -1e80, "measured_change": 1e80, "condition": 1e16, "smoothness": 1e-30, "curvature": -5},
        '{"number": 9, "loss": 1.2, "accu',
    ]
    path = write_run(rounds, dataset=HOSTILE, algorithm=HOSTILE)
    write_report([path], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html", width=390)
    page.get_by_label(unit, exact=True).check(force=True)
    settled(page)
    assert HOSTILE in page.locator("#headline").inner_text()
    assert HOSTILE in page.locator("#excluded tbody").inner_text()
    assert HOSTILE in page.locator("#legend").inner_text()
    assert page.evaluate("document.querySelectorAll('script').length") == 5
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "truncated" in page.locator("#problems").text_content()
    assert page.evaluate(DRAWN, "loss")


def test_runs_without_measures_say_so_instead_of_drawing(open_page, write_run, tmp_path: Path) -> None:
    write_report([write_run([{"number": 1}])], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert page.locator(".chart.empty").count() == len(CHARTS)
    assert "No accuracy level was reached" in page.locator("#milestones-note").inner_text()
