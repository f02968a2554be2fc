"""Figures and the worst examples in the real trackers, as they start without a server."""

import json
import math
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tracker_runs
from review_runs import COUNT, WRONG, recorded
from tracker_runs import BROKEN, HOSTILE, WORST

import microclip
from microclip.cli import main
from microclip.ledger import open_ledger
from microclip.trackers.clients import client_for, started
from microclip.trackers.figures import of_outcome, plain_name

import processes
from ledgers import Row, outcome, write

pytest.importorskip("tensorboard")
SHOWN = ["id", "flagged", "probability", "kind", "given_label", "suggested_label"]
SHOWN += ["confidence", "loss", "evidence"]
WRONG_IDS = {HOSTILE.format(i) for i in (0, 10, 20)}


class Memory:
    """A client of one's own."""

    def __init__(self):
        self.steps, self.tables = {}, {}

    def log_steps(self, steps):
        for step, figures in steps:
            assert step not in self.steps, "logged twice"
            self.steps[step] = figures

    def log_examples(self, step, table):
        self.tables[step] = table


@pytest.fixture
def writer(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "curves")) as opened:
        yield opened


def read_back(writer):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer.flush()
    found = EventAccumulator(writer.log_dir, size_guidance={"images": 0})
    found.Reload()
    return found


def shown_text(found, place=-1):
    tensor = found.Tensors(f"{WORST}/text_summary")[place].tensor_proto
    return tensor.string_val[0].decode()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard cleans HTML with
def test_tensorboard(tmp_path, writer):
    from tensorboard.plugin_util import markdown_to_safe_html

    run = recorded(tmp_path / "run", name=lambda i: f"<img src=x>|{i}\n**[a](b)")
    tracked = microclip.track(run.path, to=writer)
    assert (tracked.steps, tracked.examples, tracked.notes) == (36, 50, ())
    found = read_back(writer)
    losses = found.Scalars("microclip/loss")
    assert [each.step for each in losses] == list(range(36))
    record = open_ledger(run.ledger)
    expected = np.concatenate([batch["loss"].to_numpy() for batch in record.microbatches()])
    np.testing.assert_allclose([each.value for each in losses], expected, rtol=1e-6)
    html = markdown_to_safe_html(shown_text(found))
    rows = html.count("<tr>") - 1
    assert rows == 50
    assert "<img" not in html
    assert "<a " not in html
    assert "&lt;img src=x&gt;|290 **[a](b)</td>" in html
    assert "wrong label" in html
    assert "example 290" in html
    pictures = found.Tags()["images"]
    table = microclip.find_issues(run.ledger).table
    ids = table["id"].slice(0, 50).to_pylist()
    with_picture = [rank for rank, one in enumerate(ids, 1) if _number(one) % 20 == 0]
    assert pictures == [f"{WORST}/{rank:03}" for rank in with_picture]
    first = found.Images(pictures[0])[0]
    assert (first.width, first.height) == (8, 8)


def _number(one):
    return int(one.split("|")[1].split("\n")[0])


def logged_by(name, folder):
    pytest.importorskip(name)
    command = [sys.executable, tracker_runs.__file__, name, str(folder)]
    result = subprocess.run(
        command,
        env=tracker_runs.environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["tracked"] == {"steps": 12, "examples": 30, "notes": []}
    return found


def expect_losses(losses):
    """As recorded, with a NaN where there was one."""
    assert [step for step, _ in losses] == list(range(12))
    assert [step for step, value in losses if math.isnan(float(value))] == [BROKEN]


def expect_worst_first(ids):
    assert len(ids) == 30
    assert set(ids[:3]) == WRONG_IDS


def test_wandb(tmp_path):
    found = logged_by("wandb", tmp_path)
    ours = [each for each in found["history"] if "microclip/loss" in each]
    expect_losses([(each["microclip/step"], each["microclip/loss"]) for each in ours])
    assert found["steps_of"]["microclip/*"] == "microclip/step"
    mine = [each["mine"] for each in found["history"] if "mine" in each]
    assert mine == [1.0, 2.0]
    (shown,) = (each[WORST] for each in found["history"] if WORST in each)
    assert shown["_type"] == "table-file"
    table = found["table"]
    assert table["columns"] == [*SHOWN, "text", "picture"]
    expect_worst_first([row[0] for row in table["data"]])
    for row in table["data"]:
        number = _number(row[0])
        assert row[9] == (f"</td>text {number}" if number % 20 else None)
        assert (row[10] or {}).get("_type") == (None if number % 20 else "image-file")
    assert found["pictures"] == 2


def test_trackio(tmp_path):
    found = logged_by("trackio", tmp_path)
    ours = [each for each in found["logs"] if "microclip/loss" in each]
    expect_losses([(each["step"], each["microclip/loss"]) for each in ours])
    assert [each["step"] for each in found["logs"] if "mine" in each] == [7]
    expect_worst_first([row["id"] for row in found["table"]])
    assert list(found["table"][0]) == [*SHOWN, "text", "picture"]
    for row in found["table"]:
        if _number(row["id"]) % 20 == 0:
            assert f"trackio/media/{row['picture']['file_path']}" in found["pictures"]
        else:
            assert row["picture"] is None


@pytest.mark.full
def test_mlflow(tmp_path):
    found = logged_by("mlflow", tmp_path)
    expect_losses(found["history"]["microclip/loss"])
    assert found["history"]["mine"] == [[7, 1.0]]
    table = found["table"]
    assert table["columns"] == [*SHOWN, "text", "picture"]
    expect_worst_first([row[0] for row in table["data"]])
    expect_worst_first(found["ids"])
    for row in table["data"]:
        assert f"/{row[10]['filepath']}" in "".join(found["pictures"])
    without = found["without_pandas"]
    assert without["columns"] == [*SHOWN, "text"]
    assert [row[0] for row in without["data"]] == [row[0] for row in table["data"]]


def test_figures_of_a_clipper(tmp_path):
    """By hand, from the ledger and from the outcome alike."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    memory, live = Memory(), Memory()
    tracker = microclip.Tracker(live)
    with microclip.Ledger(tmp_path / "ledger") as ledger:
        clipper = microclip.Clipper(model, 1, ledger=ledger, noise_scale=True)
        x = torch.tensor([[3.0], [4.0], [-12.0], [5.0]])
        outcome = clipper.backward(lambda x: model(x).squeeze(1) + 2, x)  # gradients are x
        tracker.log(outcome)
    microclip.track(tmp_path / "ledger", to=memory)
    of_ledger, of_step = memory.steps[0], live.steps[0]
    expected = {"loss": 2, "norm_min": 3, "norm_mean": 6, "bound": 3, "norm_q50": 4.5, "skipped": 0}
    expected["mean_weight"] = (1 + 3 / 4 + 1 / 4 + 3 / 5) / 4
    expected["update_kept"] = 4 * 3 / 24
    for name, value in expected.items():
        assert of_ledger[f"microclip/{name}"] == pytest.approx(value, rel=1e-6), name
    noise = of_step.pop("microclip/noise_scale")
    assert noise == pytest.approx(float(outcome.noise_scale), nan_ok=True)
    assert of_step == pytest.approx(of_ledger, rel=1e-6)


def test_what_was_not_finite(tmp_path):
    memory = Memory()
    steps = [[Row([0], 2.0, loss=1.0), Row([1], bad, 0.0, loss=bad)] for bad in (np.nan, np.inf)]
    microclip.track(write(tmp_path / "ledger", steps), to=memory)
    for figures in memory.steps.values():  # skipped, as if it had not been there
        assert figures["microclip/skipped"] == 1
        assert figures["microclip/norm_mean"] == figures["microclip/norm_min"] == 2
        assert figures["microclip/loss"] == 1


def test_held_back_and_domains(tmp_path):
    steps = [[Row([0, 1], 1.0, losses=[1, 2], weights=[1, held])] for held in (0.9, 0.2)]
    memory = Memory()
    microclip.track(write(tmp_path / "ledger", steps), to=memory)
    assert [each["microclip/held_back"] for each in memory.steps.values()] == [0, 1]


@pytest.mark.parametrize("domain", ["..", "a/../b", "<b>", "x" * 300, "", "/", "a b"])
def test_names_of_domains_are_made_plain(domain):
    import re

    model = torch.nn.Linear(1, 1)
    clipper = microclip.Clipper(model, 1)
    outcome = clipper.backward(
        lambda x: model(x).squeeze(1), torch.ones(2, 1), domains=[domain, f"{domain}\n"]
    )
    names = [name for name in of_outcome(outcome) if "share" in name]
    assert len(names) == 2
    for name in names:
        assert re.fullmatch(r"microclip/weight_share/[\w.-]{1,69}", name)
        assert name.rpartition("/")[2] not in (".", "..")
    assert plain_name("microclip/loss") == "microclip/loss"


def test_only_what_is_new(tmp_path):
    memory = Memory()
    tracker = microclip.Tracker(memory, every=2, most=3)
    with microclip.Ledger(tmp_path / "ledger") as ledger:
        for epoch in range(3):
            for rows in torch.randperm(40).split(10):
                ledger.record(rows, rows.float() * (1 + epoch))
            tracked = tracker.update(ledger)
            assert tracked.steps == 2
    assert sorted(memory.steps) == [0, 2, 4, 6, 8, 10]
    assert tracker.update(ledger, examples=False).steps == 0
    assert sorted(memory.tables) == [3, 7, 11]
    assert tracker.update(ledger).examples == 0  # the same table is not logged twice
    assert memory.tables[3].columns[:2] == ["id", "score"]  # one epoch is no history
    assert "seen only once" in memory.tables[3].notes[0]
    assert memory.tables[7].columns[:3] == ["id", "flagged", "probability"]
    assert memory.tables[11].rows[0].values["id"] == 39
    assert len(memory.tables[11].rows) == 3
    resumed = Memory()
    microclip.Tracker(resumed, start=9).update(tmp_path / "ledger", examples=False)
    assert sorted(resumed.steps) == [9, 10, 11]
    assert resumed.tables == {}


def test_ranks_that_lag_behind(tmp_path):
    memory = Memory()
    tracker = microclip.Tracker(memory)
    steps = [[Row([0], 1.0, loss=1.0)]] * 5
    write(tmp_path / "ledger", steps)
    write(tmp_path / "ledger", [[Row([1], 3.0, loss=5.0)]] * 3, rank=1)
    tracked = tracker.update(tmp_path / "ledger", examples=False)
    assert tracked.steps == 3
    assert tracked.notes == ("Steps 3 to 4 are not logged yet: some ranks lag behind.",)
    assert {each["microclip/loss"] for each in memory.steps.values()} == {3.0}  # of both
    assert tracker.update(tmp_path / "ledger", examples=False, whole=True).steps == 2


def test_ranks_that_have_written_nothing(tmp_path):
    """How many ranks there are, their parts say."""
    memory, folder = Memory(), tmp_path / "ledger"
    tracker = microclip.Tracker(memory)

    def record(rank, world, loss, steps):
        with as_rank(rank, world), microclip.Ledger(folder) as ledger:
            for step in steps:
                ledger.record(outcome(step, [Row([rank], 1.0, loss=loss)]))

    record(0, 2, 1.0, range(5))
    tracked = tracker.update(folder)
    assert (tracked.steps, tracked.examples, memory.tables) == (0, 0, {})
    assert "Steps 0 to 4 are not logged yet: rank 1 of 2 wrote nothing yet." in tracked.notes[0]
    record(1, 2, 5.0, range(5))
    assert tracker.update(folder, examples=False).steps == 5
    assert {each["microclip/loss"] for each in memory.steps.values()} == {3.0}
    record(0, 1, 1.0, range(5, 8))  # resumed on one rank
    tracked = tracker.update(folder, examples=False)
    assert (tracked.steps, tracked.notes) == (3, ())


@contextmanager
def as_rank(rank, world):
    """Be a rank that does not talk to others."""
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_rank_that_nobody_expected(tmp_path):
    tracker = microclip.Tracker(Memory())
    for rank in (0, 1):
        with microclip.Ledger(tmp_path / "ledger") as ledger:
            ledger.record([rank], [1.0], rank=rank)
        notes = tracker.update(tmp_path / "ledger", examples=False).notes
    assert "Steps before 1 were logged before rank 1 had written anything" in notes[0]


@pytest.mark.full
def test_two_real_ranks(tmp_path):
    (live, whole, steps), _ = processes.run(
        tracker_runs.on_a_rank, 2, tmp_path, str(tmp_path / "ledger")
    )
    assert steps == [0, 5]  # nothing before the other rank has written, and nothing is left out
    assert live == whole
    assert sorted(live) == list(range(5))


def test_ids_that_are_positions_give_no_table(tmp_path):
    memory = Memory()
    with microclip.Ledger(tmp_path / "ledger") as ledger:
        for _ in range(30):
            ledger.record(range(25), torch.rand(25))
    tracked = microclip.track(ledger, to=memory)
    assert (tracked.steps, tracked.examples) == (30, 0)
    assert "positions in the mini-batch" in tracked.notes[0]
    assert memory.tables == {}


def test_positions_whose_labels_change_give_no_table_either(tmp_path):
    memory = Memory()
    draw = torch.Generator().manual_seed(0)
    with microclip.Ledger(tmp_path / "ledger") as ledger:
        for step in range(30):
            count = 10 if step % 5 == 4 else 25  # the last of an epoch is smaller
            logits, labels = torch.randn(count, 3), torch.randint(3, (count,), generator=draw)
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            ledger.record(range(count), losses, logits=logits, labels=labels)
    tracked = microclip.track(ledger, to=memory)
    assert (tracked.steps, tracked.examples) == (30, 0)
    assert "positions in the mini-batch" in tracked.notes[0].lower()


def test_show_says_what_examples_contain(tmp_path):
    run = recorded(tmp_path / "run")
    memory = Memory()
    shown = {0: "x" * 2000, 10: torch.rand(3, 4, 4), 20: None}
    microclip.track(run.ledger, to=memory, most=COUNT, show=shown.get)
    rows = {row.values["id"]: row for row in memory.tables[35].rows}
    assert len(rows[0].text) == 1001
    assert rows[10].picture.startswith(b"\x89PNG")
    assert rows[20].text is rows[20].picture is None
    flagged = {one for one, row in rows.items() if row.values["flagged"]}
    assert flagged == set(WRONG)


@pytest.mark.parametrize(
    ("shown", "error"),
    [
        (lambda i: i / 0, "ZeroDivisionError"),
        (lambda i: b"\x89PNG\r\n\x1a\njunk", "cannot identify image file"),
        (lambda i: 3, "An image must be an array"),
    ],
)
def test_what_cannot_be_shown_costs_no_table(tmp_path, writer, shown, error):
    run = recorded(tmp_path / "run")
    lone = {0: "\ud800 text"}
    tracked = microclip.track(
        run.ledger, to=writer, most=COUNT, show=lambda i: shown(i) if i == 10 else lone.get(i)
    )
    assert tracked.examples == COUNT
    assert "Text or picture of example 10 cannot be shown: " in tracked.notes[-1]
    assert error in tracked.notes[-1]
    assert "ud800 text" in shown_text(read_back(writer))


def test_a_picture_that_leads_elsewhere_is_left_out(tmp_path, monkeypatch):
    run = recorded(tmp_path / "run")
    (tmp_path / "secret.png").write_bytes(b"\x89PNG secret")
    with open(run.path / "examples.jsonl", "a") as file:
        file.write('{"id": 0, "kind": "image", "file": "../secret.png"}\n')
    memory = Memory()
    tracked = microclip.track(run.path, to=memory, most=COUNT)
    rows = {row.values["id"]: row for row in memory.tables[35].rows}
    assert rows[0].picture is None
    assert rows[20].picture is not None
    assert tracked.notes[-1].startswith("Text or picture of example 0 cannot be shown: ")
    monkeypatch.setattr("microclip.trackers.examples.MOST_BYTES", 10)
    tracked = microclip.track(run.path, to=Memory(), most=COUNT)
    assert tracked.notes[-1].endswith("The table has reached its size limit.")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"to": "tensorbord"}, ValueError, "to must be one of 'tensorboard', 'wandb', 'mlflow'"),
        ({"to": object()}, TypeError, "to must be a SummaryWriter, a run of wandb"),
        ({"to": Memory(), "every": 0}, ValueError, "every must be an integer of at least 1"),
        ({"to": Memory(), "most": -1}, ValueError, "most must be an integer of at least 0"),
    ],
)
def test_mistakes(arguments, error, message, tmp_path):
    path = write(tmp_path / "ledger", [[Row([0], 1.0)]])
    with pytest.raises(error, match=message):
        microclip.track(path, **arguments)


def test_more_mistakes(tmp_path):
    with pytest.raises(TypeError, match="needs the tracker's own object, but got the name 'wandb'"):
        microclip.Tracker("wandb")
    with pytest.raises(TypeError, match="record losses in a Ledger and call update"):
        microclip.Tracker(Memory()).log({"loss": 1.0})
    with pytest.raises(FileNotFoundError, match="There is no ledger at"):
        microclip.track(tmp_path / "nowhere", to="tensorboard")
    assert not (tmp_path / "nowhere").exists()  # no run was started
    with pytest.raises(TypeError, match="but got an object of type int"):
        microclip.track(3, to=Memory())


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_client_that_is_missing(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"{name} is not installed .*: pip install 'microclip\[trackers\]'"
    with pytest.raises(ImportError, match=message), started(name, "p", "n", tmp_path / "folder"):
        pass
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_run_that_was_cut_short_is_not_called_finished(monkeypatch, tmp_path, error):
    ended = []
    run = SimpleNamespace(finish=ended.append)
    wandb = SimpleNamespace(init=lambda **_: run)
    mlflow = SimpleNamespace(
        set_experiment=lambda _: None, start_run=lambda **_: run, end_run=ended.append
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for name in ("wandb", "mlflow"):
        with started(name, "p", "n", tmp_path):
            pass
        with pytest.raises(error), started(name, "p", "n", tmp_path):
            raise error
    assert ended == [None, 1, "FINISHED", "FAILED"]


def test_a_client_of_mlflow_is_not_a_run():
    client = type("MlflowClient", (), {"__module__": "mlflow.tracking.client"})()
    with pytest.raises(TypeError, match="to must be a run, such as mlflow.start_run()"):
        client_for(client)


def test_a_module_without_a_run():
    wandb = pytest.importorskip("wandb")
    with pytest.raises(ValueError, match=r"wandb has no active run: call wandb.init\(\) first."):
        client_for(wandb)


@pytest.mark.parametrize(
    ("given", "described", "files"),
    [("run", False, "run"), ("run/ledger", True, "run"), ("run/ledger", False, "run/ledger")],
)
def test_a_run_is_not_called_ledger(tmp_path, monkeypatch, given, described, files):
    with microclip.Ledger(tmp_path / "run" / "ledger") as ledger:
        for _ in range(2):
            ledger.record(["a", "b"], torch.ones(2))
    if described:
        (tmp_path / "run" / "run.json").touch()
    called = []

    @contextmanager
    def start(to, project, name, folder):
        called.append((name, folder.relative_to(tmp_path)))
        yield Memory()

    monkeypatch.setattr("microclip.trackers.tracker.started", start)
    microclip.track(tmp_path / given, to="tensorboard")
    assert called == [("run", Path(files) / "tensorboard")]


def test_the_command(tmp_path, capsys):
    run = recorded(tmp_path / "run")
    (run.path / "tensorboard").mkdir()
    (run.path / "tensorboard" / "mine").touch()
    for _ in range(2):  # the second replaces the first
        assert main(["track", str(run.path), "--most", "5"]) == 0
    assert capsys.readouterr().out == "36 steps and 5 examples were logged to tensorboard.\n" * 2
    assert len(list(Path(run.path / "tensorboard").glob("events*"))) == 1
    assert (run.path / "tensorboard" / "mine").exists()
    with pytest.raises(SystemExit, match="every must be an integer of at least 1, but got 0"):
        main(["track", str(run.path), "--every", "0"])
    assert main(["track", str(tmp_path / "nowhere")]) == 1
    assert "There is no ledger at" in capsys.readouterr().err
