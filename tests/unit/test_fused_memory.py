"""Memory of the single-pass engine: what it materializes, the allocator, the budget."""

import os
import platform
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from microclip import Clipper, rules
from microclip.engines.single_pass import rows as rows_module
from microclip.engines.single_pass.contributions import Groups, Materialized, MaterializedParts
from microclip.engines.single_pass.memory import Weight, choose_materialized
from microclip.engines.single_pass.rows import Rows

import properties
from measure import peak_memory
from models import TASKS


class TestMaterializing:
    """Weights of 8 x 8: the gradients of 4 micro-batches take 1024 bytes."""

    groups = Groups([2] * 4)

    def weight(self, rows, kept=256, **options):
        return Weight(rows=rows, p=8, q=8, itemsize=4, kept=kept, **options)

    def test_many_rows_are_materialized_and_few_are_not(self):
        """(2 rows)^2 (8 + 8) products equal 30 for each of 64 numbers at 5.5 rows."""
        assert choose_materialized({"w": self.weight(6)}, self.groups, 1024) == {"w"}
        assert choose_materialized({"w": self.weight(5)}, self.groups, 1024) == set()
        assert choose_materialized({"w": self.weight(5, worth=16)}, self.groups, 1024) == {"w"}

    def test_the_largest_gains_come_first_while_there_is_memory(self):
        weights = {"short": self.weight(8), "long": self.weight(20), "middle": self.weight(10)}
        # all kept as rows take 768, and each materialized one takes 768 more
        assert choose_materialized(weights, self.groups, 3 * 1024) == {"short", "middle", "long"}
        assert choose_materialized(weights, self.groups, 3 * 1024 - 1) == {"middle", "long"}
        assert choose_materialized(weights, self.groups, 768 + 768) == {"long"}
        assert choose_materialized(weights, self.groups, 0) == set()

    def test_what_takes_less_memory_is_materialized_under_any_limit(self):
        weights = {"small": self.weight(50, kept=2000), "large": self.weight(50)}
        assert choose_materialized(weights, self.groups, 0) == {"small"}

    def test_a_limit_does_not_change_results(self):
        """Rows of 64 tokens in micro-batches of 2: materialized only if there is room."""
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
    def test_large_gradients_are_materialized_in_parts(self, inputs_first, monkeypatch):
        """5 micro-batches of 256 x 128 numbers, of which two fit into a part."""
        torch.manual_seed(0)
        groups, ragged = Groups([2] * 5), Groups([4, 4, 2])
        rows = Rows(torch.randn(10, 3, 256), torch.randn(10, 3, 128), inputs_first)
        whole = rows.materialized(groups)
        assert isinstance(whole, Materialized)
        monkeypatch.setattr(rows_module, "LARGEST_TENSOR", 2 * 256 * 128 * 4)
        pieces = rows.materialized(groups)
        assert isinstance(pieces, MaterializedParts)
        assert [len(part.gradients) for part in pieces.parts] == [2, 2, 1]
        torch.testing.assert_close(pieces.materialize(groups), whole.gradients)
        assert pieces.nbytes == whole.nbytes
        assert isinstance(rows.materialized(ragged), Materialized)

        shares = groups.shares(torch.rand(5))
        left_out = groups.shares(torch.tensor([False, False, True, False, True]))
        for one, other in ((pieces, whole), (pieces.without(left_out), whole.without(left_out))):
            torch.testing.assert_close(one.squared_norms(groups), other.squared_norms(groups))
            torch.testing.assert_close(one.add_to(None, shares), other.add_to(None, shares))


class TestAllocator:
    """In a separate process, since the setting holds for the lifetime of a process."""

    PROGRAM = """
import resource, torch
from microclip.engines.single_pass.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20) for _ in range(40)]  # 160 MiB, in 40,000 pages
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults(), faults()
print(faults())
"""

    def faults(self, **environment):
        program = [sys.executable, "-c", self.PROGRAM]
        known = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
        answer = subprocess.run(
            program, env=known | environment, capture_output=True, text=True, check=True
        )
        return int(answer.stdout)

    @pytest.mark.full
    @pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="Only glibc has this setting.")
    def test_freed_memory_is_reused_unless_the_user_has_configured_malloc(self):
        assert self.faults() < 4_000
        assert self.faults(MALLOC_TRIM_THRESHOLD_="131072") > 20_000


class TestBudget:
    """With a budget that is far too small, every micro-batch is a chunk after the first step."""

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
                warnings.simplefilter("ignore", RuntimeWarning)  # skipped, as configured
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

    def test_chunks_are_as_large_as_the_budget_allows(self):
        model, x, sizes = self.model(), torch.randn(32, 5, 6).double(), []

        def loss_fn(x):
            sizes.append(len(x))
            return self.losses(model)(x)

        Clipper(model, 2, engine="fused", verify="never").backward(loss_fn, x)
        assert sizes == [32]
        sizes.clear()
        clipper = Clipper(model, 2, engine="fused", memory_budget=30_000, verify="never")
        clipper.backward(loss_fn, x)
        assert sizes[0] == 4  # an eighth, to measure
        sizes.clear()
        clipper.backward(loss_fn, x)
        assert len(sizes) > 1
        assert sum(sizes) == 32
        assert max(sizes) - min(sizes) <= 2  # equal up to one micro-batch
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
        """At most twice that of a plain step by default, and 1.2 times with that budget."""
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
            assert used <= times * plain

    @pytest.mark.parametrize("budget", [0, -1, 1.5, "2GB", True])
    def test_bad_budgets(self, budget):
        with pytest.raises(ValueError, match="positive number of bytes"):
            Clipper(self.model(), 2, memory_budget=budget)
