"""The single-pass engine: the algebra of contributions, layers, and refusals."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper
from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass import convolution
from microclip.engines.single_pass.contributions import Groups, Materialized, MaterializedParts
from microclip.engines.single_pass.convolution import Geometry, Patches
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.rows import EmbeddingRows, Rows, squared_norms, sum_of
from microclip.microbatches import cut

import properties
import reference
from measure import peak_memory


def assert_equals_twin(model, loss_fn, batch, b=2, tolerance=1e-12):
    parameters = [p for p in model.parameters() if p.requires_grad]
    pieces = cut(batch, b)
    gradients = reference.microbatch_gradients(
        loss_fn, parameters, [piece.batch for piece in pieces]
    )
    sizes = [piece.size for piece in pieces]
    wanted, norms, _ = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])
    outcome = Clipper(model, b, engine="fused").backward(loss_fn, batch)
    properties.assert_close([p.grad for p in parameters], wanted, tolerance)
    assert outcome.norms.tolist() == pytest.approx(norms, rel=max(tolerance, 1e-9))
    assert outcome.engine == "fused"
    model.zero_grad()


class TestAlgebra:
    groups = Groups([2, 2, 1])

    def rows(self, p=3, q=4, n=2, inputs_first=True):
        e = self.groups.examples
        inputs, deltas = torch.randn(e, n, p).double(), torch.randn(e, n, q).double()
        return Rows(inputs, deltas, inputs_first)

    def embedding_rows(self, p=3, q=4, n=2):
        e = self.groups.examples
        return EmbeddingRows(torch.randint(0, p, (e, n)), torch.randn(e, n, q).double(), p)

    def windows(self, channels=1, is_tight=False):
        """A window of 3 over 7 positions, 4 outputs: a parameter of 4 x channels x 3."""
        e = self.groups.examples
        geometry = Geometry((4, channels, 3), (2,), (1,), (1,), 1, is_tight)
        x, d = torch.randn(e, channels, 7).double(), torch.randn(e, 4, 4).double()
        return Patches(x, d, geometry)

    @pytest.mark.parametrize(
        "kinds", ["r", "l", "t", "rr", "rt", "rl", "lr", "ll", "rlm", "m", "rm", "p", "rp"]
    )
    def test_norms_and_sums_equal_those_of_materialized_gradients(self, kinds):
        """r: rows, t: transposed rows, l: embedding rows, m: materialized, p: in two parts.

        Several contributions have cross terms.
        """
        make = {
            "r": self.rows,
            "t": lambda: self.rows(4, 3, inputs_first=False),
            "l": self.embedding_rows,
            "m": lambda: Materialized(torch.randn(3, 3, 4).double()),
            "p": lambda: MaterializedParts(
                tuple(Materialized(torch.randn(n, 3, 4).double()) for n in (2, 1))
            ),
        }
        self.check([make[kind]() for kind in kinds])

    @pytest.mark.parametrize("channels", [1, 8])
    @pytest.mark.parametrize("is_tight", [False, True])
    def test_windows(self, channels, is_tight):
        """With many channels, patches are cut position by position."""
        first, second = (self.windows(channels, is_tight) for _ in range(2))
        assert first.geometry.is_better_by_place(first.d) == (channels == 8)
        self.check([first])
        self.check([first, second])

    @pytest.mark.parametrize("n", [1, 31, 32, 65, 410])
    def test_any_number_of_rows(self, n):
        """Many rows are multiplied in halves."""
        self.check([self.rows(n=n)])

    @pytest.mark.parametrize(("rest", "is_known"), [(0.1, True), (1e-3, False), (0.0, False)])
    def test_rows_that_nearly_cancel_have_no_norm(self, rest, is_known):
        """The first micro-batch has pairs of rows whose gradients differ by `rest`."""
        rows = self.rows(p=16, q=16)
        inputs, deltas = rows.inputs.float(), rows.deltas.float()
        inputs[:2, 1], deltas[:2, 1] = inputs[:2, 0], -deltas[:2, 0] * (1 - rest)
        found = Rows(inputs, deltas, True).squared_norms(self.groups)
        assert found.isfinite().tolist() == [is_known, True, True]

    def check(self, contributions):
        """Norms, sums, columns and left-out micro-batches, as delivered and as kept."""
        gradients = sum_of([each.materialize(self.groups) for each in contributions])
        coefficients = torch.tensor([0.5, 2.0, 0.0]).double()
        wanted = torch.einsum("j,j...->...", coefficients, gradients)
        left_out = self.groups.shares(torch.tensor([False, True, False]))
        for given in (contributions, [each.kept(self.groups) for each in contributions]):
            norms = squared_norms(given, self.groups)
            torch.testing.assert_close(norms.double(), gradients.flatten(1).square().sum(1))
            total = None
            for each in given:
                total = each.add_to(total, self.groups.shares(coefficients))
            torch.testing.assert_close(total.view_as(wanted), wanted)
            assert total.is_contiguous()
            rest = sum_of([each.without(left_out).materialize(self.groups) for each in given])
            torch.testing.assert_close(rest[[0, 2]], gradients[[0, 2]])
            assert not rest[1].any()
            columns = sum_of([each.columns(self.groups, 1, 3) for each in given])
            torch.testing.assert_close(columns, gradients[:, 1:3].flatten(1))

    def test_columns_of_looked_up_rows(self):
        """Rows 1 and 2 of those that were looked up: rows 4 and 7 of the table."""
        indices = torch.tensor([[0, 4], [7, 4], [7, 7], [0, 0], [4, 0]])
        contribution = EmbeddingRows(indices, torch.randn(5, 2, 3).double(), 9)
        found = contribution.columns(self.groups, 1, 3, torch.tensor([0, 4, 7]))
        wanted = contribution.materialize(self.groups)[:, [4, 7]].flatten(1)
        torch.testing.assert_close(found, wanted)

    @pytest.mark.parametrize(
        ("size", "dtype"), [(9, torch.float64), (9, torch.float32), (33, torch.float32)]
    )
    @pytest.mark.parametrize("channels", [11, 40])
    @pytest.mark.parametrize("is_tight", [False, True])
    def test_windows_have_the_gradients_of_convolutions(
        self, size, dtype, channels, is_tight, monkeypatch
    ):
        """Materialized from patches, or by one grouped convolution if there are many positions."""
        monkeypatch.setattr(convolution, "WORTH_SAVING", 0)
        x = torch.randn(5, channels, size, 18).to(dtype).requires_grad_()
        weight = torch.randn(3, channels, 3, 2).to(dtype).requires_grad_()
        options = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
        out = F.conv2d(x, weight, **options)
        d = torch.randn_like(out)
        geometry = Geometry(tuple(weight.shape), *options.values(), 1, is_tight)
        windows = Patches(x.detach(), d, geometry)
        assert geometry.is_better_by_place(d) == (channels == 40)
        (wanted,) = torch.autograd.grad(out, x, d)
        found = geometry.input_gradient(d, x.detach(), weight.detach())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert windows._is_better_grouped(self.groups) == (size == 33)
        gradients = windows.materialize(self.groups)
        for row, (start, stop) in enumerate([(0, 2), (2, 4), (4, 5)]):
            out = F.conv2d(x[start:stop], weight, **options)
            (wanted,) = torch.autograd.grad(out, weight, d[start:stop])
            torch.testing.assert_close(gradients[row], wanted, rtol=1e-4, atol=1e-5)

    def test_materializing_by_hand(self):
        """Two examples of one row each, (1, 2) x (3, 4) and (0, 1) x (5, 6)."""
        rows = Rows(
            torch.tensor([[[1.0, 2.0]], [[0.0, 1.0]]]),
            torch.tensor([[[3.0, 4.0]], [[5.0, 6.0]]]),
            inputs_first=True,
        )
        assert rows.materialize(Groups([2])).tolist() == [[[3, 4], [11, 14]]]
        assert rows.materialize(Groups([1, 1])).tolist() == [
            [[3, 4], [6, 8]],
            [[0, 0], [5, 6]],
        ]
        assert rows.squared_norms(Groups([1, 1])).tolist() == [125, 61]

    def test_blocks(self):
        blocks = list(Groups([3, 3, 1, 2, 2]))
        assert [(b.first_example, b.first_microbatch, b.count, b.size) for b in blocks] == [
            (0, 0, 2, 3),
            (6, 2, 1, 1),
            (7, 3, 2, 2),
        ]


class TestLayers:
    @pytest.mark.parametrize("frozen", [None, "weight", "bias"])
    def test_group_norm(self, frozen):
        model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.GroupNorm(3, 6), nn.Tanh()).double()
        if frozen:
            getattr(model[1], frozen).requires_grad_(False)
        assert_equals_twin(
            model, lambda x: model(x).square().mean((1, 2)), torch.randn(5, 2, 9).double()
        )

    @pytest.mark.parametrize("layer", ["linear", "conv", "norm"])
    def test_hooks_and_in_place_changes_after_a_layer(self, layer):
        """Gradients are as the hooks leave them, and outputs may be modified."""
        layers = {"linear": nn.Linear(6, 6), "conv": nn.Conv1d(4, 4, 3), "norm": nn.LayerNorm(6)}
        model = nn.Sequential(nn.Linear(5, 6), layers[layer], nn.ReLU(inplace=True)).double()

        def loss_fn(x):
            hidden = model[1](model[0](x))
            hidden.register_hook(lambda gradient: gradient * torch.arange(gradient.shape[-1]))
            return model[2](hidden).square().mean((1, 2))

        assert_equals_twin(model, loss_fn, torch.randn(6, 4, 5).double())

    def test_embedding_with_padding(self):
        model = nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 2)).double()
        tokens = torch.tensor([[0, 1, 2], [1, 1, 1], [4, 4, 1], [2, 3, 0], [1, 0, 4]])
        assert_equals_twin(model, lambda x: model(x).square().mean((1, 2)), tokens)

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_large_vocabulary_needs_no_large_tables(self, tied):
        """Memory as in a plain step, not one table for each of 16 micro-batches."""
        embedding, head = nn.Embedding(20_000, 8), nn.Linear(8, 20_000, bias=False)
        if tied:
            head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        tokens = torch.randint(0, 20_000, (16, 2))

        def loss_fn(tokens):
            return F.cross_entropy(model(tokens).mT, tokens, reduction="none").mean(1)

        def peak(step):
            model.zero_grad()
            step()
            model.zero_grad()
            return peak_memory(step)

        clipper = Clipper(model, 1, engine="fused")
        fused = peak(lambda: clipper.backward(loss_fn, tokens))
        plain = peak(lambda: loss_fn(tokens).mean().backward())
        assert fused < 2 * plain

    def test_as_many_positions_as_examples(self):
        """Positions and examples are distinguished by origin, not by shape."""
        positions = nn.Embedding(6, 3)
        model = nn.ModuleList([positions, nn.Linear(3, 2)]).double()

        def loss_fn(x):
            places = torch.arange(x.shape[1])
            distances = (places[:, None] - places[None, :]).abs()
            bias = positions(distances).mean(-1)  # (positions, positions)
            return model[1](bias @ x).square().mean((1, 2))

        assert_equals_twin(model, loss_fn, torch.randn(6, 6, 3).double())

    @pytest.mark.parametrize("same", [True, False])
    def test_attention(self, same):
        model = nn.ModuleList([nn.MultiheadAttention(4, 2, batch_first=True)]).double()

        def loss_fn(batch):
            query, memory = batch
            return model[0](query, *[query if same else memory] * 2)[0].square().mean((1, 2))

        assert_equals_twin(
            model, loss_fn, (torch.randn(5, 3, 4).double(), torch.randn(5, 6, 4).double())
        )

    def test_a_parameter_used_in_many_ways(self):
        model = nn.ParameterList([nn.Parameter(torch.randn(4, 4).double())])

        def loss_fn(x):
            w = model[0]
            hidden = F.linear(x, w) + x @ w + w.diagonal() + x * w[0] + w.sum()
            return hidden.square().mean(1)

        assert_equals_twin(model, loss_fn, torch.randn(5, 4).double(), tolerance=1e-11)

    def test_uses_that_do_not_reach_the_loss(self):
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double()

        def loss_fn(x):
            model[1](x)  # thrown away
            return (model[0](x) + model[0](x).detach()).square().mean(1)

        assert_equals_twin(model, loss_fn, torch.randn(5, 3).double())

    @pytest.mark.parametrize("where", ["inside", "around"])
    def test_autocast(self, where):
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        batch = torch.randn(12, 16), torch.randint(0, 4, (12,))

        def loss_fn(batch):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(batch[0])
            return F.cross_entropy(logits.float(), batch[1], reduction="none")

        Clipper(model, 4, engine="stream").backward(loss_fn, batch)
        wanted = [p.grad for p in model.parameters()]
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            Clipper(model, 4, engine="fused").backward(loss_fn, batch)
        properties.assert_close([p.grad for p in model.parameters()], wanted, 0.02)

    def test_chunks(self):
        model = nn.Linear(3, 2).double()
        x = torch.randn(10, 3).double()

        def loss_fn(x):
            return model(x).square().mean(1)

        Clipper(model, 2, engine="stream").backward(loss_fn, x)
        wanted = [p.grad for p in model.parameters()]
        model.zero_grad()
        clipper = Clipper(model, 2, engine="fused")
        clipper.fold(loss_fn, x[:4])
        clipper.fold(loss_fn, x[4:])
        clipper.finish()
        properties.assert_close([p.grad for p in model.parameters()], wanted, 1e-12)

    def test_grad_scaler(self):
        model = nn.Linear(3, 2)
        x = torch.randn(10, 3)

        def loss_fn(x):
            return model(x).square().mean(1)

        plain = Clipper(model, 2, engine="fused").backward(loss_fn, x)
        wanted = [1024 * p.grad for p in model.parameters()]
        model.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        outcome = Clipper(model, 2, engine="fused", grad_scaler=scaler).backward(loss_fn, x)
        properties.assert_close([p.grad for p in model.parameters()], wanted, 1e-5)
        assert outcome.norms.tolist() == pytest.approx(plain.norms.tolist(), rel=1e-6)

    @pytest.mark.parametrize("policy", ["propagate", "skip"])
    def test_not_finite(self, policy):
        model = nn.Linear(3, 2)
        x = torch.randn(6, 3)
        x[3] = torch.nan
        clipper = Clipper(model, 2, engine="fused", nonfinite=policy)
        if policy == "propagate":
            clipper.backward(lambda x: model(x).square().mean(1), x)
            assert all(p.grad.isnan().all() for p in model.parameters())
            return
        with pytest.warns(RuntimeWarning, match="Skipped 1 of 3"):
            clipper.backward(lambda x: model(x).square().mean(1), x)
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        good = torch.cat([x[:2], x[4:]])
        Clipper(model, 2).backward(lambda x: model(x).square().mean(1), good)
        properties.assert_close(found, [p.grad for p in model.parameters()], 1e-5)


class TestRefusals:
    def refused(self, model, loss_fn, batch, message):
        with pytest.raises(NotImplementedError, match=message):
            Clipper(model, 2, engine="fused").backward(loss_fn, batch)
        assert all(p.grad is None for p in model.parameters())

    def test_mean_loss(self):
        model = nn.Linear(3, 2)
        self.refused(model, lambda x: model(x).mean(), torch.randn(4, 3), "one loss per example")

    def test_batchnorm_by_its_name(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.refused(model, lambda x: model(x).mean(1), torch.randn(4, 3), "'1' is a BatchNorm1d")
        model.eval()
        Clipper(model, 2, engine="fused").backward(lambda x: model(x).mean(1), torch.randn(4, 3))

    def test_functional_batchnorm(self):
        model = nn.Linear(3, 3)
        self.refused(
            model,
            lambda x: F.batch_norm(model(x), None, None, model.bias, training=True).mean(1),
            torch.randn(4, 3),
            "mixes examples",
        )

    @pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
    def test_hooks(self, register):
        model = nn.Linear(3, 2)
        getattr(model.weight, register)(lambda _: None)
        self.refused(model, lambda x: model(x).mean(1), torch.randn(4, 3), "'weight' has a hook")

    def test_losses_that_depend_on_gradients(self):
        """Such as a gradient penalty."""
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def loss_fn(x):
            x = x.requires_grad_()
            (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return slopes.square().sum(1)

        with pytest.raises(CannotFuseError, match="differentiated twice"):
            Clipper(model, 2, engine="fused").backward(loss_fn, torch.randn(6, 3))

    def test_sparse_embeddings(self):
        model = nn.Embedding(4, 2, sparse=True)
        self.refused(model, lambda x: model(x).mean(1), torch.tensor([0, 1, 2, 3]), "sparse")

    def test_mixed_examples_by_function_and_module(self):
        class Centre(nn.Module):
            def forward(self, x):
                return x - x.mean(0)

        model = nn.Sequential(nn.Linear(3, 3), Centre(), nn.Linear(3, 2))
        words = r"result of mean\(\), which mixes examples, in module '1' \(Centre\)"
        self.refused(model, lambda x: model(x).mean(1), torch.randn(4, 3), words)

    def test_parameters_between_examples(self):
        model = nn.ParameterList([torch.randn(1, 3), torch.randn(3)])

        def loss_fn(x):
            return (torch.cat([x, model[0]]) * model[1]).sum(1)[: len(x)]

        self.refused(model, loss_fn, torch.randn(4, 3), "puts parameter '0' between examples")

    def test_several_losses_for_one_example(self):
        model = nn.Linear(3, 1)
        self.refused(
            model,
            lambda x: model(x[[0, 0, *range(2, len(x))]]).squeeze(1),
            torch.randn(4, 3),
            r"some examples have several: the losses belong to examples \[0, 0, 2, 3\]",
        )


def test_passes_that_never_began_leave_room_for_others():
    """A recorder that an interrupt kept from watching, however often."""
    parameters = dict(nn.Linear(2, 1).named_parameters())
    kept = [Recorder(parameters, Groups([1, 1]), [], {}, None) for _ in range(1500)]
    assert len({recorder.tracker.mark for recorder in kept}) == 1500
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    assert_equals_twin(model, lambda x: model(x).pow(2).mean(1), x, tolerance=1e-5)
