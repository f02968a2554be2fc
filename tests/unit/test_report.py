"""What the page says about runs: statistics, sections, hostile data, the command."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
from scipy.special import stdtrit

import microclip
from microclip.cli import main
from microclip.report import RunFolder
from microclip.report.blocks import Figure, Gallery, Table
from microclip.report.comparison import Comparison, compare, lower_is_better, verdicts
from microclip.report.figures import histogram
from microclip.report.page import LARGEST_PAGE, embedded, render
from microclip.report.run_data import read_timeline
from microclip.report.runs import read_run
from microclip.report.statistics import Estimate, estimate, t_quantile
from microclip.report.traces import thinned
from microclip.report.write import write_report

import ledgers
from report_runs import EXAMPLES, blocks, described, ledger, page_of, said, sweep

HOSTILE = "<script>window.pwned=1</script><img src=x onerror=alert(1)>\"'`${1}&amp;{{7*7}}\u2028"


# ------------------------------------------------------------------------ statistics, comparison


@pytest.mark.parametrize("freedom", [1, 2, 3, 6, 7, 20, 99, 1000])
def test_quantiles_are_those_of_student(freedom):
    assert t_quantile(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=1e-9)


def test_one_value_has_no_interval():
    assert estimate([3.0]) == Estimate(3.0, None, None, 1)


def comparison(tmp_path, **options) -> Comparison:
    (found,) = compare([read_run(path) for path in sweep(tmp_path, **options)])
    return found


def test_settings_are_compared_seed_by_seed(tmp_path):
    found = comparison(tmp_path)
    assert found.group == "sweep"
    assert [setting.name for setting in found.settings] == ["plain training", "b = 2", "b = 4"]
    assert found.headline == "test_accuracy"
    assert found.is_curve
    plain, two, four = found.rows("test_accuracy")
    assert plain.difference is None
    assert plain.value.mean == pytest.approx(0.91)
    assert two.difference == Estimate(0, 0, 0, 3)
    # 0.020, 0.021, 0.022: mean 0.021, t(2) = 4.3027 times 0.001 / sqrt(3)
    assert four.difference.mean == pytest.approx(0.021)
    assert four.difference.high - four.difference.mean == pytest.approx(
        4.3027e-3 / 3**0.5, rel=1e-4
    )
    assert verdicts(found) == [
        "Best by validation_accuracy: b = 4. Its test_accuracy differs from plain training by "
        "+0.0210 (+0.0185 to +0.0235), over 3 seeds: clipping helps here."
    ]


@pytest.mark.parametrize(
    ("by_seed", "ending"),
    [
        ([0.01, 0.02, 0.015], "clipping helps here."),
        ([-0.01, 0.02, 0.0], "no clear difference"),
        ([-0.01, -0.02, -0.015], "plain training is better here."),
        ([0.5], "one seed says little."),
    ],
)
@pytest.mark.parametrize("metric", ["accuracy", "error"])
def test_the_verdict_follows_from_the_numbers(by_seed, ending, metric, tmp_path):
    for seed, gain in enumerate(by_seed):
        for b in (None, 4):
            run = RunFolder(tmp_path / f"{b}-{seed}", microbatch_size=b, seed=seed)
            better = gain if b else 0.0
            run.log(1, **{metric: 0.5 - better if metric == "error" else 0.5 + better})
    (found,) = compare([read_run(path) for path in sorted(tmp_path.iterdir())])
    (sentence,) = verdicts(found)
    assert sentence.startswith(f"b = 4: its {metric} differs from plain training by ")
    assert ending in sentence
    assert "flatters" not in sentence  # there was nothing to choose from


def test_a_choice_by_the_metric_it_is_judged_by_flatters(tmp_path):
    for seed in range(3):
        for b in (None, 2, 4):
            run = RunFolder(tmp_path / f"{b}-{seed}", microbatch_size=b, seed=seed)
            run.log(1, accuracy=0.5 - (b or 0) / 100 - seed / 1000 * (b or 0))
    (found,) = compare([read_run(path) for path in sorted(tmp_path.iterdir())])
    (sentence,) = verdicts(found)
    assert sentence.startswith("Best by accuracy: b = 2. Its accuracy differs from plain training")
    assert "no b beats plain training here. The best b was chosen by the same metric" in sentence


def test_runs_that_cannot_be_paired_say_why(tmp_path):
    plain = RunFolder(tmp_path / "plain", seed=0, settings={"lr": 1})
    other = RunFolder(tmp_path / "other", seed=0, settings={"lr": 2})
    apart = RunFolder(tmp_path / "apart", microbatch_size=4, seed=5)
    paired = RunFolder(tmp_path / "paired", microbatch_size=2, seed=0)
    for run in (plain, other, apart, paired):
        run.log(1, loss=1)
    assert "no other setting has a seed in common" in said(page_of(plain.path, apart.path))
    assert "several settings" in said(page_of(plain.path, other.path, paired.path))
    assert "no plain training among the runs" in said(page_of(apart.path, paired.path))
    (found,) = compare([read_run(run.path) for run in (plain, other)])
    assert [setting.name for setting in found.settings] == [
        "plain training, lr 1",
        "plain training, lr 2",
    ]
    assert verdicts(found) == []


def test_names_say_which_direction_is_better():
    assert all(map(lower_is_better, ("loss", "val_loss", "WER", "test error", "ppl")))
    assert not any(map(lower_is_better, ("accuracy", "answer", "power", "f1", "reward")))


# -------------------------------------------------------------------------- ledgers and sections


def test_a_timeline_by_hand(tmp_path):
    from ledgers import Row, write

    steps = [[Row([1], 1.0, 1.0, loss=2.0), Row([2, 3], 3.0, 0.25, loss=5.0)], [Row([1], 2.0, 0.5)]]
    timeline = read_timeline(write(tmp_path / "ledger", steps))
    assert (timeline.first, timeline.last, timeline.recorded, timeline.microbatches) == (0, 1, 2, 3)
    assert timeline.steps == [0.0, 1.0]
    assert timeline.norms[0.5] == [2.0, 2.0]
    assert timeline.norms[0.25] == [1.5, 2.0]
    assert timeline.loss == [4.0, None]
    assert timeline.largest == 2
    assert timeline.mean_weight == pytest.approx((1 + 2 * 0.25 + 0.5) / 4)


def test_long_timelines_are_summarized_in_stretches(tmp_path):
    path = ledger(tmp_path / "ledger", steps=301)
    timeline = read_timeline(path)
    assert len(timeline.steps) == 120
    assert timeline.steps == sorted(timeline.steps)
    assert timeline.recorded == 301
    assert timeline.microbatches == 301 * 6


def test_gradients_that_are_not_finite_are_counted(tmp_path):
    from ledgers import Row, write

    rows = [[Row([1], float("nan"), 0.0), Row([2], float("inf"), float("nan"))]] * 2
    page = page_of(write(tmp_path / "ledger", rows))
    assert "4 micro-batches had a gradient that was not finite" in said(page)
    assert render(page)


def test_the_page_of_a_described_run(tmp_path):
    page = page_of(described(tmp_path / "run").path, gallery=8)
    (gallery,) = blocks(page, Gallery)
    assert [tile.id for tile in gallery.tiles] == ["21", "18", "15", "12", "9", "6", "3", "0"]
    assert all(tile.wrong for tile in gallery.tiles)
    assert "Of the 8 examples with the highest scores, 8 have a wrong label." in said(page)
    assert (
        "8 of the 24 labels are known to be wrong, and 8 of these are among the 8 highest scores "
        "(100 %; by chance it would be 33 %)." in page.verdict[1]
    )
    table = next(block for block in blocks(page, Table) if block.key.startswith("scores"))
    assert len(table.rows) == EXAMPLES
    assert [cell.text for cell in table.rows[0][:4]] == ["1", "21", "1", "2"]
    csv = base64.b64decode(table.download.split(",")[1]).decode()
    assert csv.splitlines()[1].startswith("21,1,")
    assert "None of the 2 domains is held back" in said(page)


def test_domains_of_the_ledger_and_the_guards_finding(tmp_path):
    path = ledger(
        tmp_path / "ledger", domain=lambda i: "hard <b>" if i % 3 == 0 else "easy", steps=120
    )
    page = page_of(path)
    assert "Clipping holds the domain 'hard <b>' back" in said(page)
    assert "It holds back whole domains: hard <b>" in page.verdict[0]
    keys = [figure.key for figure in blocks(page, Figure)]
    assert {"domains-1", "domains-time-1"} <= set(keys)


def test_positions_in_the_batch_are_not_examples(tmp_path):
    from ledgers import Row, write

    path = write(tmp_path / "ledger", [[Row([0, 1], 1.0), Row([2, 3], 2.0)]] * 3)
    assert "look like positions in the mini-batch" in said(page_of(path))


def test_positions_are_not_counted_without_saying_so(tmp_path):
    with microclip.Ledger(tmp_path) as record:
        for step in range(6):
            record.record(range(40), [1.0 + (7 * i + step) % 13 for i in range(40)])
    page = page_of(tmp_path)
    assert len(page.headlines) == 1
    assert "the result means nothing" in page.verdict[1]
    drag = next(one for one in page.sections if one.title == "Which examples drag?")
    assert "look like positions in the mini-batch" in drag.blocks[0].text


def test_losses_that_are_not_finite_show_nothing(tmp_path):
    with microclip.Ledger(tmp_path) as record:
        for _ in range(3):
            record.record([f"a{i}" for i in range(30)], [float("nan")] * 30)
    (sentence,) = page_of(tmp_path).verdict
    assert sentence.endswith("nothing was clipped in 3 steps. None of its losses is finite.")


def test_norms_without_losses_are_not_called_losses(tmp_path):
    run = RunFolder(tmp_path, microbatch_size=None)
    ledgers.write(run.ledger, [[ledgers.Row([f"a{i}"], 1.0 + i) for i in range(4)]] * 3)
    (sentence,) = page_of(tmp_path).verdict
    assert sentence.endswith("Its gradient norms show which of 4 examples are hard.")


@pytest.mark.parametrize(("b", "start"), [(None, "Plain training: nothing"), (1, "Nothing")])
def test_norms_that_were_only_recorded_are_not_said_to_be_clipped(tmp_path, b, start):
    """What a Clipper with rule=Keep() records."""
    path = tmp_path if b is None else RunFolder(tmp_path, microbatch_size=b).ledger
    rows = [[ledgers.Row([f"a{i}"], 1.0 + i, losses=[0.1 * i]) for i in range(4)]] * 3
    ledgers.write(path, rows)
    page = page_of(tmp_path)
    assert page.verdict[0].startswith(f"{start} was clipped in 3 steps. Its losses show which of 4")
    assert "Gradients" in (titles := [section.title for section in page.sections])
    assert "Held back most" not in titles


def test_a_gallery_of_less_than_nothing(tmp_path):
    with pytest.raises(ValueError, match="gallery must be 0 or more, but got -3."):
        write_report([tmp_path], tmp_path / "page.html", gallery=-3)


def test_many_ledgers_are_too_many(tmp_path):
    paths = [ledger(tmp_path / f"run{i}" / "ledger", steps=3) for i in range(5)]
    page = page_of(*paths)
    assert "5 runs have a ledger; only the first 4 are shown." in said(page)
    assert len(blocks(page, Gallery)) == 4
    assert "Which examples drag? (run3)" in [section.title for section in page.sections]
    assert len(render(page)) < LARGEST_PAGE


def test_every_figure_is_valid_and_says_how_to_read_it(tmp_path):
    run = described(tmp_path / "all")
    page = page_of(*sweep(tmp_path / "sweep"), run.path)
    figures = blocks(page, Figure)
    assert len(figures) == 8
    for figure in figures:
        assert len(figure.how_to_read) > 40
        for drawing in figure.choices.values():
            text = json.dumps({"data": drawing.data, "layout": dict(drawing.layout)})
            colours = re.sub(r"var\(--[a-z0-9-]+\)", "#123456", text)
            assert go.Figure(json.loads(colours)).data  # refuses what it does not know
    style = (Path(embedded.__code__.co_filename).parent / "style.css").read_text()
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", json.dumps([str(f.choices) for f in figures])))
    for name in used:
        assert style.count(f"{name}:") == 3, name  # light, dark by the system, dark by choice


def test_long_curves_are_thinned_to_their_last_point():
    xs, ys = thinned({step: float(step) for step in range(10_000)}, 100)
    assert len(xs) == len(ys) == 100
    assert (xs[-1], ys[-1]) == (9999, 9999.0)
    assert ys == sorted(ys)
    assert thinned({1: 1.0, 2: 2.0}, 100) == ([1, 2], [1.0, 2.0])


def test_what_differs_between_runs_is_listed(tmp_path):
    page = page_of(*sweep(tmp_path))
    tables = {table.key: table for table in blocks(page, Table)}
    assert tables["differences"].headings == ("run", "micro-batch size b", "seeds")
    rows = [[cell.text for cell in row] for row in tables["differences"].rows]
    assert rows == [
        ["3 runs", "plain", "0 to 2"],
        ["3 runs", "2", "0 to 2"],
        ["3 runs", "4", "0 to 2"],
    ]
    assert [row[1].marked for row in tables["differences"].rows] == [False, True, True]
    shared = {row[0].text: row[1].text for row in tables["shared"].rows}
    assert (shared["lr"], shared["data.noise"]) == ("0.1", "0.2")


# --------------------------------------------------------------------------------- hostile data


def test_hostile_texts_stay_texts(tmp_path):
    run = RunFolder(tmp_path / "run", name=HOSTILE, group=HOSTILE, settings={HOSTILE: HOSTILE})
    ledger(run.ledger, name=lambda i: f"={HOSTILE}{i}")
    for i in range(EXAMPLES):
        run.example(f"={HOSTILE}{i}", text=HOSTILE, label=HOSTILE, domain=f"{HOSTILE}{i % 2}")
    run.log_all(1, {HOSTILE: 1})
    run.log_all(2, {HOSTILE: 2, "</script>": 1})
    html = render(page_of(run.path)).decode()
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)  # plotly's, and our two
    assert html.count("<script>") == 3
    assert "&lt;script&gt;window.pwned=1" in own
    assert "\\u0026lt;script\\u0026gt;" in own
    assert "<img src=x" not in html
    assert "{{7*7}}" in html  # and not 49
    (csv,) = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', own)
    assert all(
        line.startswith("\"'=") for line in base64.b64decode(csv).decode().split("\n")[1:] if line
    )


def test_texts_of_a_megabyte_are_cut(tmp_path):
    long = "<&>" * 350_000
    run = RunFolder(tmp_path / "run", name=long, settings={long: long}, command=long)
    ledger(
        run.ledger,
        name=lambda i: f"{i}{long[:100_000]}",
        domain=lambda i: f"{i % 2}{long}",
        steps=2,
    )
    for i in range(EXAMPLES):
        run.example(f"{i}{long[:100_000]}", text=long, label=long, truth=long)
    run.log_all(1, {long: 1})
    content = render(page_of(run.path))
    assert len(content) < 6_000_000
    assert b"The first 2,000 of 1,050,000 characters." in content
    assert b"(1,050,000 characters)" in content


def test_lone_surrogates_do_not_stop_the_page(tmp_path):
    run = RunFolder(tmp_path / "run", name="half")
    run.log(1, loss=1)
    described_ = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(described_ | {"command": "\ud800 \0 \x1b[31m"}))
    assert b"? \0" in render(page_of(run.path))


def test_json_in_the_page_ends_no_script():
    text = embedded({"</script>": ["<!--", "&", "\u2028", float("nan"), float("inf")]})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"</script>": ["<!--", "&", "\u2028", None, None]}


# -------------------------------------------------------------------------------------- command


def test_the_command_writes_the_page_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    paths = [str(path) for path in sweep(tmp_path / "runs")]
    described(tmp_path / "runs" / "b4-0")
    assert main(["report", *paths, paths[0], "--title", "Mine & <b>yours</b>"]) == 0
    printed, log = capsys.readouterr()
    assert printed.splitlines()[-1] == "page: report.html"
    assert "clipping helps here." in printed
    assert "reading 9 runs" in log  # one was named twice
    assert "scoring 240 micro-batches" in log
    html = (tmp_path / "report.html").read_text()
    assert "<title>Mine &amp; &lt;b&gt;yours&lt;/b&gt;</title>" in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "runs"]


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    run = sweep(tmp_path / "runs", sizes=(None,), seeds=(0,))[0]
    assert main(["report", str(run), "--output", str(tmp_path / "no" / "page.html")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    taken = tmp_path / "taken"
    taken.mkdir()
    assert main(["report", str(run), "--output", str(taken)]) == 1
    wanted = f"microclip: Cannot write {taken}: it is a folder. Name a file in it.\n"
    assert capsys.readouterr().err == wanted  # before the run is read
    assert not list(taken.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "runs must name at least one folder"),
        (("a", "--gallery", "-1"), "gallery must be between 0 and 1000, but got -1."),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as exit_:
        main(["report", *arguments])
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_page_can_be_opened_at_once(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = sweep(tmp_path, sizes=(None,), seeds=(0,))[0]
    assert main(["report", str(path), "--output", str(tmp_path / "a b.html"), "--open"]) == 0
    assert opened == [(tmp_path / "a b.html").as_uri()]
    assert "There is nothing to compare yet" in (tmp_path / "a b.html").read_text()


def test_calling_it_from_code(tmp_path):
    path = sweep(tmp_path, sizes=(None,), seeds=(0,))[0]
    page = microclip.report.write_report([path, path], tmp_path / "page.html")
    assert page.title == "microclip: plain-0"
    with pytest.raises(TypeError, match="runs must be a list of folders"):
        microclip.report.write_report(path, tmp_path / "other.html")
    with pytest.raises(ValueError, match="at least one folder"):
        microclip.report.write_report([], tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        microclip.report.nonsense  # noqa: B018


def test_overlong_lines_are_skipped(tmp_path):
    run = RunFolder(tmp_path)
    run.log(1, loss=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 2, "long": "' + "x" * 33_000_000 + '"}\n')
    run.log(3, loss=3)
    found = read_run(tmp_path)
    assert found.metrics == {"loss": {1: 1.0, 3: 3.0}}
    assert "1 line " in found.notes[0]


def test_outliers_do_not_flatten_the_histogram():
    values = [0.001 * i for i in range(1000)] + [1e6]
    drawn = histogram({"examples": values}, "score").data[0]
    assert sum(drawn["y"]) == 1001
    assert drawn["x"][-1] < 2
    assert max(drawn["y"]) < 100


def test_the_same_runs_make_the_same_page(tmp_path):
    run = described(tmp_path / "run")
    assert render(page_of(run.path)) == render(page_of(run.path))


def test_a_run_read_twice_is_the_same(tmp_path):
    path = sweep(tmp_path, sizes=(4,), seeds=(0,))[0]
    one, two = read_run(path), read_run(path)
    assert replace(one, name="x").metrics == two.metrics


def test_a_plain_run_is_not_said_to_be_clipped(tmp_path):
    run = RunFolder(tmp_path / "run", microbatch_size=None, headline="test_accuracy")
    rows = [
        [ledgers.Row(ids=[0, 1, 2, 3], norm=1.0 + step, losses=[0.1, 0.2, 0.3, 2.0])]
        for step in range(20)
    ]
    ledgers.write(run.ledger, rows)
    run.log(20, test_accuracy=0.875)
    page = write_report([run.path], tmp_path / "page.html")
    assert page.verdict == [
        "test_accuracy is 0.875 after step 20.",
        "Plain training: nothing was clipped in 20 steps. Its losses show which of 4 examples are "
        "hard.",
    ]
    titles = [section.title for section in page.sections]
    assert titles[1:] == ["Gradients", "Which examples drag?", "Scores", "What was run"]
