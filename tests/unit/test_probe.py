"""`microclip.probe` from a user's view: table, best, sentence, plots, draggers, callback."""

import csv
import io
import math
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import microclip
from microclip.cli import main
from microclip.probing import Best, ProbeEvery
from microclip.probing.draggers import compare_draggers, cosines_to_the_rest
from microclip.rules import LossHistory, LossWeight, Median, MinNorm, Quantile, Unit, parse_rule

PNG = b"\x89PNG"


class Task:
    """A linear model whose draggers have labels that are far off."""

    def __init__(self, batches=4, size=32, draggers=0.2, seed=0, scale=30.0):
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Linear(20, 1).double()
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        count = batches * size
        x = torch.randn(count, 20, dtype=torch.float64, generator=generator)
        self.wrong = torch.rand(count, generator=generator) < draggers
        noise = torch.randn(count, dtype=torch.float64, generator=generator)
        y = torch.where(self.wrong, scale * noise, x[:, 0] * 3 + noise)
        self.batches = list(zip(x.split(size), y.split(size), strict=True))

    def losses(self, batch):
        return (self.model(batch[0]).squeeze(1) - batch[1]).square() / 2

    def probe(self, *args, **options):
        return microclip.probe(self.model, self.losses, self.batches, *args, **options)


@pytest.fixture(scope="module")
def clear():
    """Many examples, wild draggers: small sizes help, and clearly so."""
    return Task(batches=12).probe(replicates=400)


def test_the_table(clear):
    assert [row.size for row in clear.rows] == [1, 2, 4, 8, 16, 32]
    assert (len(clear), clear.batch_size, clear.held_out) == (384, 32, 352)
    for row in clear.rows:
        assert row.rule == "MinNorm()"
        assert row.microbatches == 32 // row.size
        assert 0 < row.norm_low <= row.norm_median <= row.norm_high
        assert row.gain_low <= row.gain <= row.gain_high
        assert 0 < row.mean_weight <= 1
        assert 1 <= row.effective_sample_size <= 32
        assert -1 <= row.alignment <= 1
    whole = clear.row(32)
    assert (whole.mean_weight, whole.effective_sample_size) == (1.0, pytest.approx(32))
    assert whole.gain == pytest.approx(1)
    assert whole.efficiency == pytest.approx(clear.plain_efficiency)
    assert sum(row.first for row in clear.rows) <= 1 + 1e-9
    assert clear.noise_scale > 32  # a batch of 32 is mostly noise here


def test_draggers_make_small_sizes_better(clear):
    assert clear.best.size in (1, 2, 4)
    assert clear.best.helps
    assert clear.best.low > 1
    assert clear.row(2).gain > clear.row(16).gain > 1
    assert clear.sentence.startswith(f"b = {clear.best.size}: at these weights one step is better")


def test_the_same_seed_gives_the_same_probe():
    task = Task()
    one, other, third = (task.probe(seed=seed, draws=32) for seed in (1, 1, 2))
    assert one.to_csv() == other.to_csv() != third.to_csv()


def test_as_text(clear, tmp_path):
    text = str(clear)
    lines = text.splitlines()
    assert lines[: len(clear.suggestions)] == clear.suggestions
    assert lines[0].startswith("The top tenth of the examples holds ")
    title = next(i for i, line in enumerate(lines) if line.startswith("384 examples, steps of B"))
    assert " = 32 judged by 352 others, MinNorm()" in lines[title]
    assert len({len(line) for line in lines[title + 1 : title + 8]}) == 1  # aligned
    assert clear.sentence in text
    table = list(csv.DictReader(io.StringIO(clear.to_csv(tmp_path / "table.csv"))))
    assert (tmp_path / "table.csv").read_text() == clear.to_csv()
    assert [int(row["size"]) for row in table] == [1, 2, 4, 8, 16, 32]
    assert float(table[2]["gain"]) == clear.row(4).gain


def test_as_a_plot(clear, tmp_path):
    clear.plot(tmp_path / "probe.png")
    assert (tmp_path / "probe.png").read_bytes().startswith(PNG)
    several = Task().probe([1, 3, 32], [MinNorm(), Unit()], draws=16, replicates=16)
    several.plot(tmp_path / "several.png")
    assert (tmp_path / "several.png").read_bytes().startswith(PNG)


def test_without_matplotlib_the_extra_is_named(clear, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'microclip\[plot\]'"):
        clear.plot(tmp_path / "probe.png")


def test_sizes_rules_and_ragged_ends():
    found = Task().probe([7, 3, 3, 32], {"paper": MinNorm(), "middle": Median()}, draws=16)
    assert [(row.rule, row.size) for row in found.rows] == [
        (rule, size) for rule in ("paper", "middle") for size in (3, 7, 32)
    ]
    assert found.row(7).microbatches == 5
    assert found.row(3, "middle").rule == "middle"
    with pytest.raises(KeyError, match="b = 5"):
        found.row(5)


def test_one_batch_makes_steps_of_half_of_it():
    task = Task(batches=1, size=64)
    found = task.probe(draws=16, replicates=16)
    assert (found.batch_size, found.held_out) == (32, 32)
    assert "fewer than the batches" in "".join(found.notes)
    assert "fewer than the batches" in str(found)
    assert [row.size for row in found.rows] == [1, 2, 4, 8, 16, 32]


def test_held_out_batches_judge_full_steps():
    task, clean = Task(batches=1, size=64), Task(batches=3, size=40, draggers=0.0, seed=1)
    found = task.probe(held_out=clean.batches, draws=16, replicates=16)
    assert (found.batch_size, found.held_out, len(found)) == (64, 120, 184)
    assert not found.notes


def test_clean_judges_see_the_gain_more_clearly():
    task, clean = Task(batches=4), Task(batches=8, draggers=0.0, seed=1)
    noisy, clear = task.probe(), task.probe(held_out=clean.batches)
    assert clear.row(2).alignment > noisy.row(2).alignment > 0


def test_a_chosen_batch_size():
    found = Task(batches=2, size=32).probe(batch_size=12, draws=16, replicates=16)
    assert (found.batch_size, found.held_out) == (12, 52)
    assert [row.size for row in found.rows] == [1, 2, 4, 8, 12]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": [64]}, "must not be larger than B = 32.*but got 64. A micro-batch cannot"),
        ({"sizes": [0]}, "sizes must be positive integers, but got 0."),
        ({"sizes": [2.5]}, "sizes must be positive integers, but got 2.5."),
        ({"sizes": [True]}, "sizes must be positive integers, but got True."),
        ({"sizes": []}, "sizes is empty"),
        ({"rules": []}, "rules is empty"),
        ({"batch_size": 127}, "batch_size must be from 2 to 126.*two must be left.*but got 127"),
        ({"batch_size": 1}, "batch_size must be from 2 to 126"),
        ({"batch_size": 0}, "batch_size must be a positive integer, but got 0."),
        ({"rules": LossHistory()}, "single step, but LossHistory weights .*: leave it out.$"),
        ({"rules": [LossWeight(clip=Unit())]}, "leave it out. Probe what it clips by, Unit\\(\\)"),
        ({"draws": 1}, "draws must be an integer of 2 or more, but got 1."),
        ({"replicates": 0}, "replicates must be an integer of 2 or more, but got 0."),
    ],
)
def test_bad_options_are_refused_with_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        Task().probe(**options)


def test_sizes_that_more_batches_would_allow():
    with pytest.raises(ValueError, match="larger than B = 16.*but got 32. Pass more batches"):
        Task(batches=1).probe([32])


def test_only_rules_are_accepted():
    with pytest.raises(TypeError, match="rules must be rules .* but got 'min'"):
        Task().probe(rules=["min"])


def test_gradients_that_are_zero_tell_nothing():
    model = torch.nn.Linear(3, 1)
    batches = list(torch.randn(3, 16, 3))
    found = microclip.probe(model, lambda x: 0 * model(x).squeeze(1), batches, draws=8)
    assert found.best is None
    assert found.sentence.startswith("No answer: the gradients of all examples are 0.")
    assert not found.figures
    assert "0 %" not in str(found).partition("By kind of data")[0].partition("examples, steps")[0]


def test_bad_examples_are_refused():
    task = Task()
    task.batches[1][1][5] = math.nan
    with pytest.raises(ValueError, match="not finite: 5 of batch 1"):
        task.probe()
    with pytest.raises(ValueError, match="one loss per example"):
        microclip.probe(task.model, lambda batch: task.losses(batch).mean(), task.batches[:1])


# the sentence


def told(probe, **changes):
    return replace(probe, best=replace(probe.best, **changes)).sentence


def test_no_sentence_recommends_without_saying_what_it_cannot_tell(clear):
    for found in (clear, Task(draggers=0.0).probe(draws=32), Task(batches=1).probe(draws=32)):
        if found.best is not None:
            assert "cannot tell where training with a size ends up" in found.sentence
            assert "probe again later" in found.sentence
    assert re.search(r"race b = \d+(, b = \d+)* and b = \d+ against plain", clear.sentence)


def test_the_sentence_is_only_as_sure_as_the_data(clear):
    sure = told(clear, size=4, gain=1.9, low=1.4, high=2.6, over_plain=0.99, rivals=())
    assert sure.startswith(
        "b = 4: at these weights one step is better than a plain one, worth 1.90 times as much "
        "(1.40 to 2.60). This looks"
    )
    unsure = told(clear, size=4, gain=1.9, low=0.8, high=4.0, over_plain=0.9, rivals=())
    assert unsure.startswith("No b clearly helps here: b = 4 ranks first, worth 1.90 times")
    assert "in 10 % of the resamplings a plain step is better" in unsure
    rivals = told(clear, size=4, over_plain=1.0, rivals=(("MinNorm()", 2), ("MinNorm()", 8)))
    assert "b = 2 and b = 8 cannot be distinguished from it." in rivals
    plain = told(clear, size=32, gain=1.0, rivals=())
    assert plain.startswith("No b helps here: every size is worse than plain training")
    vague = told(clear, size=4, low=-math.inf, high=math.inf, over_plain=0.9)
    assert "though so few examples do not tell by how much" in vague
    away = told(clear, size=4, gain=math.inf, over_plain=0.99)
    assert "does not even point along the gradient" in away


def test_b_1_comes_with_a_warning(clear):
    rows = tuple(replace(row, bound_spread=0.6) for row in clear.rows)
    assert "Caution: b = 1" in told(replace(clear, rows=rows), size=1)
    assert "Caution" not in told(replace(clear, rows=rows), size=2)


def test_no_answer():
    found = replace(Task().probe(draws=16), best=None)
    assert found.sentence.startswith("No answer: the gradient that 96 held-out examples")


def test_pure_noise_is_not_taken_for_a_finding():
    """Labels unrelated to x: in most samples no size may seem to help."""
    verdicts = []
    for seed in range(10):
        task = Task(batches=4, draggers=1.0, scale=1.0, seed=seed)
        best = task.probe(draws=64, replicates=400).best
        verdicts.append(best is not None and best.helps)
    assert sum(verdicts) <= 2


# draggers


def test_cosines_to_the_rest_by_hand():
    """(1, 0), (0, 1), (1, 1): the rest of the first is (1, 2), of the third (1, 1)."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    wanted = [1 / 5**0.5, 1 / 5**0.5, 1.0]
    assert cosines_to_the_rest(rows @ rows.T).tolist() == pytest.approx(wanted)


def test_figure_1_and_c_hat_by_hand():
    """Benign (1, 0), (2, 0), (0, 3), (10, 0); draggers (0, -4), (0, 4)."""
    rows = torch.tensor(
        [[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [10.0, 0.0], [0.0, -4.0], [0.0, 4.0]],
        dtype=torch.float64,
    )
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    found = compare_draggers(rows @ rows.T, labels, trim=0.25, resamplings=50)
    assert (found.draggers, found.benign) == (2, 4)
    assert found.dragger_benign.value == pytest.approx(0.0)  # -1 and 1 with the third, else 0
    assert found.benign_benign.value == pytest.approx(3 / 6)
    assert found.dragger_dragger.value == pytest.approx(-1.0)
    # the benign mean is (13, 3) / 4
    assert found.dragger_to_mean.value == pytest.approx(0.0)
    to_rest = [12 / 153**0.5, 11 / 130**0.5, 0.0, 3 / 18**0.5]
    assert found.benign_to_mean.value == pytest.approx(sum(to_rest) / 4)
    assert found.dragger_over_benign.value == pytest.approx(4 / 2)  # of 1, 2, 3: 10 is trimmed
    assert found.benign_over_dragger.value == pytest.approx(2 / 4)
    # |g|^2 from pairs: 2 + 10 + 20 of six
    assert found.dragger_over_mean.value == pytest.approx(4 / (32 / 6) ** 0.5)
    assert found.dragger_benign.low <= 0 <= found.dragger_benign.high
    text = str(found)
    for part in ("2 draggers, 4 benign", "c-hat as printed", "dragger-dragger"):
        assert part in text


def test_a_sample_of_one_example_has_no_pair():
    """Of three draggers, every ninth sample has one of them three times."""
    rows = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = compare_draggers(rows @ rows.T, torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]), resamplings=200)
    assert found.dragger_dragger is not None
    assert -1 <= found.dragger_dragger.low <= found.dragger_dragger.high <= 1


def test_draggers_of_a_probe():
    task = Task()
    found = task.probe(draws=16)
    seen = found.draggers(task.wrong)
    assert seen.dragger_over_benign.low > 3  # labels 30 times as wild
    assert seen.benign_over_dragger.value == pytest.approx(1 / seen.dragger_over_benign.value)
    assert seen.benign_to_mean.value > seen.dragger_to_mean.value
    assert seen.benign_benign.low > abs(seen.dragger_benign.value)
    assert found.cosines.shape == found.norms.shape == (128,)
    one = found.draggers([True] + [False] * 127, resamplings=10)
    assert one.dragger_dragger is None
    assert "no pair" in str(one)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([True] * 3, {}, "4 examples were probed, but there are 3 labels"),
        ([False] * 4, {}, "at least one dragger and two benign examples, but 0 of 4"),
        ([True] * 3 + [False], {}, "but 3 of 4"),
        ([True] + [False] * 3, {"trim": 1.0}, "trim must be a share .* but got 1.0"),
    ],
)
def test_labels_that_do_not_fit(labels, options, message):
    with pytest.raises(ValueError, match=message):
        compare_draggers(torch.eye(4, dtype=torch.float64), torch.tensor(labels), **options)


# during training


class Net(nn.Module):
    """Dropout draws random numbers, a buffer counts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


def train(watch, steps=9):
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    modes = []

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    for _ in range(steps):
        batch = torch.randn(12, 6), torch.randint(0, 3, (12,))
        optimizer.zero_grad()
        loss_fn(batch).mean().backward()
        before = [p.grad.clone() for p in model.parameters()]
        if watch is not None:
            watch.step(model, loss_fn, batch)
        assert all(
            torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True)
        )
        modes.append(model.training)
        optimizer.step()
    assert all(modes)
    return model


def test_a_watched_run_is_the_same_run():
    watch = ProbeEvery(3, sizes=[1, 4], draws=8, replicates=8)
    watched, alone = train(watch), train(None)
    assert watched.calls == alone.calls == 9
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [moment.step for moment in watch.history] == [2, 5, 8]


def test_the_history_and_its_plot(tmp_path):
    watch = microclip.ProbeEvery(3, recent=3, sizes=[1, 4, 12], draws=8, replicates=8)
    with pytest.raises(ValueError, match="nothing to plot: 0 steps"):
        watch.plot(tmp_path / "early.png")
    assert watch.sentence.startswith("Nothing to report yet")
    train(watch)
    assert all(len(moment.rows) == 3 for moment in watch.history)
    assert str(watch).count("step ") >= 3
    watch.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(PNG)


def test_the_sentence_about_drift():
    watch = ProbeEvery(10, draws=8)
    assert watch._recent.maxlen == 2
    task = Task(batches=2)
    found = task.probe(draws=8, replicates=8)
    for step, size in ((9, 1), (19, 4), (29, 4)):
        best = Best("MinNorm()", size, 1.5, 1.2, 2.0, 0.9, 0.99, ())
        watch.history.append(microclip.probing.Moment(step, found.rows, best, ""))
    assert watch.sentence.startswith(
        "Ranked first: b = 1 at step 9, then b = 4 from step 19 to 29; in 3 of 3 probes"
    )
    assert "race the two or three sizes" in watch.sentence


@pytest.mark.parametrize("options", [{"n": 0}, {"n": 2.0}, {"n": 2, "recent": 0}])
def test_bad_intervals_are_refused(options):
    with pytest.raises(ValueError, match="must be a positive integer, but got"):
        ProbeEvery(**options)


# the command

TASKS = """
import torch
layer = torch.nn.Linear(3, 1)
def good():
    x = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    return layer, lambda x: (layer(x).squeeze(1) - x[:, 0]).square(), list(x)
def needy(x):
    return x
def short():
    return layer
def meany():
    return layer, lambda x: layer(x).mean(), [torch.ones(8, 3)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "probe_tasks_here.py").write_text(TASKS)
    (tmp_path / "probe_broken.py").write_text("import nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("probe_tasks_here", None)


def test_the_command(folder, capsys):
    options = "--sizes 1 4 --rules MinNorm Quantile(0.5) --draws 16 --csv t.csv --plot p.png"
    assert main(["probe", "--task", "probe_tasks_here:good", *options.split()]) == 0
    printed = capsys.readouterr().out
    assert "steps of B = 16" in printed
    assert "Quantile(q=0.5" in printed
    assert "where training with a size ends up" in printed
    assert (folder / "t.csv").read_text().count("\n") == 5
    assert (folder / "p.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("probe_tasks_here:nothing", "", "'probe_tasks_here' has no function 'nothing'"),
        ("probe_tasks_here:needy", "", "probe_tasks_here:needy is called without arguments, but n"),
        ("probe_tasks_here:short", "", "must return \\(model, loss_fn, batches\\), but .* Linear"),
        ("probe_tasks_here:meany", "", "one loss per example"),
        ("not_there_at_all:x", "", "There is no module 'not_there_at_all', neither in /.* nor in"),
        ("not_there.at_all:x", "", "There is no module 'not_there.at_all'.* --task tasks:digits"),
        ("probe_broken:x", "", "'probe_broken' cannot be imported: No module named 'nowhere'"),
        ("probe_tasks_here:good", "--rules Max", "There is no rule 'Max'; there are Automatic"),
        ("probe_tasks_here:good", "--rules 1+", "'1\\+' is not a rule"),
        ("probe_tasks_here:good", "--sizes 99", "must not be larger than B = 16"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_mistakes_end_in_a_message(task, options, message):
    with pytest.raises(SystemExit, match=f"microclip: .*{message}"):
        main(["probe", "--task", task, *options.split()])


@pytest.mark.parametrize("task", ["tasks", "tasks:", ":digits", ".tasks:digits", "/a/b.py:digits"])
def test_a_task_is_a_module_and_a_function(task, capsys):
    with pytest.raises(SystemExit):
        main(["probe", "--task", task])
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "task must be written as module:function" in error
    assert f"but got {task!r}." in error


@pytest.mark.parametrize("command", ["probe --task", "spikes . --replay"])
def test_a_file_that_is_named_instead_of_its_module_is_not_run(folder, capsys, command):
    (folder / "train_here.py").write_text("raise RuntimeError('this trains')")
    with pytest.raises(SystemExit):
        main([*command.split(), "train_here.py:last"])
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "must be written as module:function" in error
    assert "but got 'train_here.py:last'." in error


def test_a_result_is_printed_whatever_becomes_of_its_plot(folder, capsys):
    options = "--sizes 4 --draws 8 --csv t.csv --plot p.odd"
    with pytest.raises(SystemExit, match="microclip: .*odd"):
        main(["probe", "--task", "probe_tasks_here:good", *options.split()])
    assert "steps of B = 16" in capsys.readouterr().out
    assert (folder / "t.csv").exists()
    assert main(["probe", "--task", "probe_tasks_here:good", "--plot", "not-there/p.png"]) == 1
    said = capsys.readouterr()
    assert "Cannot write not-there/p.png" in said.err
    assert not said.out  # found before it was probed


def test_rules_as_text():
    assert parse_rule("Unit") == Unit()
    assert parse_rule("Quantile(0.25)") == Quantile(0.25)
    assert parse_rule("Median(rescale=True)") == Median(rescale=True)
    for text in ("__import__('os')", "Rule", "rules.Unit"):
        with pytest.raises(ValueError, match="There is no rule"):
            parse_rule(text)
