"""What the single-pass engine holds in memory: the plan, the workspace, the budget."""

import copy
import warnings

import pytest
import torch
from torch import nn

from microclip import Clipper, rules
from microclip.engines.fused.groups import Groups
from microclip.engines.fused.plan import Weight, to_write_out
from microclip.engines.fused.uses import Formed, Halves, Rows
from microclip.engines.fused.workspace import Workspace

import properties
from measure import peak_memory
from models import TASKS


class TestPlan:
    """Weights of 8 x 8, of which 4 micro-batches' gradients take 1024 bytes."""

    groups = Groups([2] * 4)

    def weight(self, rows, kept=256, **options):
        return Weight(rows=rows, p=8, q=8, itemsize=4, kept=kept, **options)

    def test_long_rows_are_written_out_and_short_ones_are_not(self):
        """(2 rows)^2 (8 + 8) products are as many as 30 for each of 64 numbers at 5.5 rows."""
        assert to_write_out({"w": self.weight(6)}, self.groups, 1024) == {"w"}
        assert to_write_out({"w": self.weight(5)}, self.groups, 1024) == set()
        assert to_write_out({"w": self.weight(5, worth=16)}, self.groups, 1024) == {"w"}

    def test_the_best_come_first_while_there_is_memory(self):
        weights = {"short": self.weight(8), "long": self.weight(20), "middle": self.weight(10)}
        # all kept as rows take 768, and each that is written out 768 more
        assert to_write_out(weights, self.groups, 3 * 1024) == {"short", "middle", "long"}
        assert to_write_out(weights, self.groups, 3 * 1024 - 1) == {"middle", "long"}
        assert to_write_out(weights, self.groups, 768 + 768) == {"long"}
        assert to_write_out(weights, self.groups, 0) == set()

    def test_what_takes_less_memory_is_written_out_under_any_limit(self):
        weights = {"small": self.weight(50, kept=2000), "large": self.weight(50)}
        assert to_write_out(weights, self.groups, 0) == {"small"}

    def test_a_limit_decides_and_results_stay(self):
        """Rows of 64 tokens in micro-batches of 2: written out if there is room, else not."""
        torch.manual_seed(0)
        task, found = TASKS["gpt"](4), []
        for budget in (None, 1):
            task.model.zero_grad()
            clipper = Clipper(task.model, 2, engine="fused", memory_budget=budget)
            clipper.backward(task.losses, task.batch)
            found.append([p.grad for p in task.model.parameters()])
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 1e-5 * one.norm()

    @pytest.mark.parametrize("inputs_first", [True, False])
    def test_gradients_are_written_in_halves_where_only_those_find_room(self, inputs_first):
        """5 micro-batches of 256 x 128 numbers, in halves of 2 and 3."""
        torch.manual_seed(0)
        groups, workspace = Groups([2] * 5), Workspace()
        rows = Rows(torch.randn(10, 3, 256), torch.randn(10, 3, 128), inputs_first)
        wanted = rows.form(groups, Workspace())
        whole = rows.written_out(groups, workspace)
        assert isinstance(whole, Formed)  # nothing is there: as well a whole block
        assert torch.equal(whole.gradients, wanted)
        workspace.clear()
        workspace.empty((3 * 256 * 128,), wanted)
        halves = rows.written_out(groups, workspace)
        assert isinstance(halves, Halves)
        assert [len(half.gradients) for half in (halves.first, halves.second)] == [2, 3]
        torch.testing.assert_close(halves.form(groups, workspace), wanted)
        del whole, halves
        workspace.empty((5 * 256 * 128,), wanted)
        assert isinstance(rows.written_out(groups, workspace), Formed)
        ragged = Groups([4, 4, 2])
        workspace.clear()
        workspace.empty((2 * 256 * 128,), wanted)
        assert isinstance(rows.written_out(ragged, workspace), Formed)


class TestWorkspace:
    """Tensors of 2^16 numbers or more, since smaller ones are left to the system."""

    like = torch.zeros(1)

    def test_memory_is_lent_again_once_no_tensor_lies_in_it(self):
        workspace = Workspace()
        first, second = (workspace.empty((256, 256), self.like) for _ in range(2))
        addresses = {first.data_ptr(), second.data_ptr()}
        assert len(addresses) == 2
        part = first[:3].mT
        del first
        third = workspace.empty((256, 256), self.like)
        assert third.data_ptr() not in addresses  # someone still looks at a part of the first
        del part
        assert workspace.empty((2**16,), self.like).data_ptr() in addresses - {second.data_ptr()}
        assert workspace.nbytes == 3 * 2**18

    def test_a_block_may_be_somewhat_too_large(self):
        workspace = Workspace()
        address = workspace.empty((2**17,), self.like).data_ptr()
        assert workspace.empty((3 * 2**15,), self.like).data_ptr() == address
        assert workspace.empty((2**16 - 2048,), self.like).data_ptr() != address

    def test_what_a_step_did_not_need_is_let_go(self):
        workspace = Workspace()
        workspace.empty((2**20,), self.like)
        workspace.rest()
        assert workspace.nbytes == 2**22
        workspace.empty((2**16,), self.like)
        assert workspace.touched == 2**18
        workspace.rest()
        assert workspace.nbytes == 2**18
        workspace.at_rest = 2**18 - 1
        workspace.empty((2**16,), self.like)
        workspace.rest()
        assert workspace.nbytes == 0

    def test_what_is_let_go_does_not_count(self):
        workspace = Workspace()
        workspace.empty((2**20,), self.like)
        workspace.rest()
        workspace.at_rest = 2**18
        workspace.empty((2**16,), self.like)
        workspace.rest()
        assert workspace.nbytes == 2**18

    def test_tensors_outlive_it(self):
        workspace = Workspace()
        tensor = workspace.empty((2**16,), self.like).fill_(3)
        assert workspace.holds(tensor.data_ptr())
        workspace.clear()
        assert not workspace.holds(tensor.data_ptr())
        del workspace
        assert tensor.sum() == 3 * 2**16

    def test_what_lies_in_it_is_kept_without_a_copy(self):
        workspace = Workspace()
        inside, outside = workspace.empty((256, 256), self.like), torch.randn(256, 256)
        assert workspace.keep(inside) is inside
        assert workspace.keep(outside).data_ptr() != outside.data_ptr()
        assert torch.equal(workspace.keep(outside.mT), outside.mT)

    def test_small_tensors_are_left_to_the_system(self):
        workspace = Workspace()
        workspace.empty((2**15 - 1,), self.like)
        assert workspace.nbytes == 0

    def test_outputs_are_no_views_and_can_be_changed_in_place(self):
        """As `nn.ReLU(inplace=True)` does."""
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(inplace=True), nn.Linear(256, 4))
        plain = copy.deepcopy(model)
        x = torch.randn(512, 256)
        Clipper(model, 256, engine="fused").backward(lambda x: model(x).square().mean(1), x)
        Clipper(plain, 256, engine="stream").backward(lambda x: plain(x).square().mean(1), x)
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-6)

    def test_outputs_that_someone_keeps_are_not_overwritten(self):
        model = nn.Linear(256, 256)
        clipper = Clipper(model, 2, engine="fused")
        kept = []

        def losses(x):
            kept.append(model(x))
            return kept[-1].square().mean(1)

        for scale in (1.0, 2.0, 3.0):
            model.zero_grad()
            clipper.backward(losses, torch.full((512, 256), scale))
        for scale, output in zip((1.0, 2.0, 3.0), kept, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(output, model(torch.full((512, 256), scale)))

    def test_gradients_are_not_in_memory_that_is_used_again(self):
        model = nn.Linear(8, 8)
        clipper = Clipper(model, 2, engine="fused")
        x = torch.randn(8, 5, 8)
        clipper.backward(lambda x: model(x).square().mean((1, 2)), x)
        first, kept = model.weight.grad, model.weight.grad.clone()
        model.zero_grad()
        clipper.backward(lambda x: model(x).square().mean((1, 2)), 2 * x)
        assert torch.equal(first, kept)


class TestBudget:
    """A budget far too small makes every micro-batch a chunk after the first step's probe."""

    def model(self):
        layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()

    @pytest.mark.parametrize("rule", [rules.MinNorm(), rules.Unit(), rules.Median()])
    @pytest.mark.parametrize("domains", [None, [0, 1] * 8 + [2, 2, 0]])
    @pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
    def test_chunks_never_change_the_result(self, rule, domains, nonfinite):
        model = self.model()
        x = torch.randn(19, 5, 6).double()
        if nonfinite == "skip":
            x[4] = torch.nan

        def step(**options):
            model.zero_grad()
            clipper = Clipper(model, 3, rule=rule, nonfinite=nonfinite, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # left out, as asked
                for _ in range(2):
                    model.zero_grad()
                    clipper.backward(self.losses(model), x, domains=domains)
            return [p.grad for p in model.parameters()], clipper.outcome

        wanted, whole = step(engine="fused")
        found, chunked = step(engine="fused", memory_budget=1)
        properties.assert_close(found, wanted, 1e-12)
        torch.testing.assert_close(chunked.norms, whole.norms, equal_nan=True)
        properties.assert_close(found, step(engine="two_pass")[0], 1e-12)

    def losses(self, model):
        return lambda x: model(x).square().mean((1, 2))

    def test_visits_are_as_large_as_the_budget_allows(self):
        model, x, sizes = self.model(), torch.randn(32, 5, 6).double(), []

        def loss_fn(x):
            sizes.append(len(x))
            return self.losses(model)(x)

        Clipper(model, 2, engine="fused").backward(loss_fn, x)
        assert sizes == [32]
        sizes.clear()
        clipper = Clipper(model, 2, engine="fused", memory_budget=30_000)
        clipper.backward(loss_fn, x)
        assert sizes[0] == 4  # an eighth, to find out
        sizes.clear()
        clipper.backward(loss_fn, x)
        assert len(sizes) > 1
        assert sum(sizes) == 32
        assert max(sizes) - min(sizes) <= 2  # alike, but for one micro-batch
        assert all(size % 2 == 0 for size in sizes)

    @pytest.mark.parametrize("budget", [None, 1000])
    def test_models_that_save_nothing(self, budget):
        """Inputs and parameters were there before the step, and do not count."""
        model = nn.Linear(3, 2, bias=False)
        clipper = Clipper(model, 2, engine="fused", memory_budget=budget)
        x = torch.randn(8, 3)
        for _ in range(3):
            model.zero_grad()
            outcome = clipper.backward(lambda x: model(x).mean(1), x)
        assert torch.equal(outcome.sizes, torch.tensor([2, 2, 2, 2]))
        assert outcome.norms.min() > 0

    def test_longer_examples_get_smaller_chunks(self):
        model, sizes = self.model(), []

        def loss_fn(x):
            sizes.append(len(x))
            return self.losses(model)(x)

        clipper = Clipper(model, 1, engine="fused", memory_budget=60_000)
        first = {}
        for length in (9, 9, 10):  # 54 and 60 numbers, of one class
            sizes.clear()
            clipper.backward(loss_fn, torch.randn(64, length, 6).double())
            first[length] = sizes[0]
        assert 1 < first[10] < first[9]

    @pytest.mark.parametrize("task", ["gpt", "conv"])
    def test_memory(self, task):
        """At most twice a plain step's by default, at most 1.2 times as much if that is asked."""
        torch.manual_seed(0)
        task = TASKS[task](8)

        def peak(step):
            task.model.zero_grad()
            step()
            task.model.zero_grad()
            return peak_memory(step)

        plain = peak(lambda: task.losses(task.batch).mean().backward())
        for budget, times in ((None, 2.0), (int(1.2 * plain), 1.2)):
            clipper = Clipper(task.model, 1, engine="fused", memory_budget=budget)
            used = peak(lambda clipper=clipper: clipper.backward(task.losses, task.batch))
            assert used + clipper.held_memory <= times * plain

    @pytest.mark.parametrize("budget", [0, -1, 1.5, "2GB", True])
    def test_bad_budgets(self, budget):
        with pytest.raises(ValueError, match="positive number of bytes"):
            Clipper(self.model(), 2, memory_budget=budget)
