"""Batches with time along their first dimension: cut along it by mistake, or with batch_dim=1."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper

import reference


class Tagger(nn.Module):
    def __init__(self, kind, batch_first=False):
        super().__init__()
        if kind == "attention":
            self.body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)
        else:
            self.body = getattr(nn, kind)(4, 4, batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        found = self.body(x)
        return self.head(found[0] if isinstance(found, tuple) else found)


KINDS = ["LSTM", "GRU", "RNN", "attention"]
TIME, EXAMPLES = 5, 6


class TestTimeFirst:
    def make(self, kind):
        torch.manual_seed(0)
        model = Tagger(kind)
        return model, (torch.randn(TIME, EXAMPLES, 4), torch.randint(0, 3, (TIME, EXAMPLES)))

    def losses(self, model, reduction="mean"):
        def mean(batch):
            return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        def each(batch):
            losses = F.cross_entropy(model(batch[0]).movedim(2, 1), batch[1], reduction="none")
            return losses.mean(0)

        return mean if reduction == "mean" else each

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("b", [1, 2])
    def test_cut_along_time_is_noticed(self, kind, b):
        model, whole = self.make(kind)
        with pytest.warns(RuntimeWarning, match=r"batch_first=False.*batch_dim=1"):
            Clipper(model, b, engine="stream").backward(self.losses(model), whole)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("b", [1, 2, 4, EXAMPLES])
    @pytest.mark.parametrize("engine", ["stream", "two_pass", "fused", "auto"])
    def test_batch_dim(self, kind, b, engine):
        model, (x, y) = self.make(kind)
        loss_fn = self.losses(model, "none" if engine in ("fused", "auto") else "mean")
        parts = [(x[:, i : i + b], y[:, i : i + b]) for i in range(0, EXAMPLES, b)]
        stored = reference.microbatch_gradients(loss_fn, list(model.parameters()), parts)
        sizes = [part[0].shape[1] for part in parts]
        wanted = reference.clipped_gradient(stored, sizes, reference.WEIGH["MinNorm()"])[0]
        clipper = Clipper(model, b, engine=engine, batch_dim=1)
        outcome = clipper.backward(loss_fn, (x, y), ids=[f"id{i}" for i in range(EXAMPLES)])
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-4, atol=1e-6)
        assert outcome.sizes.tolist() == sizes
        assert outcome.ids[0] == tuple(f"id{i}" for i in range(b))

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_model_that_turns_its_batch_round_is_fine(self, kind):
        model = Tagger(kind)

        def loss_fn(batch):
            logits = model(batch[0].transpose(0, 1)).transpose(0, 1)
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

        whole = torch.randn(EXAMPLES, TIME, 4), torch.randint(0, 3, (EXAMPLES, TIME))
        Clipper(model, 2).backward(loss_fn, whole)

    def test_domains_and_labels_of_one_dimension(self):
        """Labels (examples,) are cut along their only dimension."""
        model, (x, _) = self.make("GRU")
        labels, domains = torch.randint(0, 3, (EXAMPLES,)), ["b", "a", "b", "a", "b", "a"]
        seen = []

        def loss_fn(batch):
            seen.append((tuple(batch["x"].shape), tuple(batch["y"].shape)))
            return F.cross_entropy(model(batch["x"])[-1], batch["y"])

        clipper = Clipper(model, 3, engine="stream", batch_dim=1)
        outcome = clipper.backward(loss_fn, {"x": x, "y": labels}, domains=domains)
        assert seen == [((TIME, 3, 4), (3,))] * 2
        assert outcome.ids == ((1, 3, 5), (0, 2, 4))

    @pytest.mark.parametrize("bad", [-1, 1.0, True, "1", None])
    def test_bad_dimensions(self, bad):
        with pytest.raises(ValueError, match="batch_dim must be 0 or a positive integer"):
            Clipper(nn.Linear(3, 2), batch_dim=bad)

    def test_unequal_lengths_name_the_remedy(self):
        model, (x, _) = self.make("GRU")
        with pytest.raises(ValueError, match="batch_dim=1"):
            Clipper(model, 2).backward(self.losses(model), (x, torch.zeros(EXAMPLES)))
