"""Finding what a loss is the mean over, from several batches: one example alone tells nothing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForMaskedImageModeling

import properties
import reference
from trainers import Ordered, Watch, clipped, stacked, trainer

COUNT = 16


class Tagger(nn.Module):
    """Classifies tokens, with the given loss."""

    def __init__(self, loss, tags=5):
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.tokens, self.head = nn.Embedding(200, 8), nn.Linear(8, tags)

    def forward(self, input_ids, labels, attention_mask=None, importance=None, times=None):
        scores = self.head(torch.tanh(self.tokens(input_ids))).flatten(0, 1)
        each = F.cross_entropy(scores, labels.flatten().clamp(min=0), reduction="none")
        more = {"attention_mask": attention_mask, "importance": importance, "times": times}
        return {"loss": self.loss(each.view(labels.shape), labels, input_ids, **more)}


def without_0(each, labels, input_ids, **more):
    return (each * (labels != 0)).sum() / (labels != 0).sum()


def without_0_or_nothing(each, labels, input_ids, **more):
    return (each * (labels != 0)).sum() / (labels != 0).sum().clamp(min=1)


def without_4(each, labels, input_ids, **more):
    return (each * (labels != 4)).sum() / (labels != 4).sum()


def of_all(each, labels, input_ids, **more):
    return each.mean()


def of_tags(each, labels, input_ids, **more):
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0])[labels]
    return (each * weights).sum() / weights.sum()


def of_mask(each, labels, input_ids, attention_mask, **more):
    return (each * attention_mask).sum() / attention_mask.sum()


def of_importance(each, labels, input_ids, importance, **more):
    return (each.mean(1) * importance).sum() / importance.sum()


def of_times(each, labels, input_ids, times, **more):
    return (each.mean(1) * times).sum() / times.sum()


def of_rare_words(each, labels, input_ids, **more):
    """Weighted by word, which is neither a column nor a label."""
    rare = 1.0 + (input_ids > 100)
    return (each * rare).sum() / rare.sum()


def of_squares(each, labels, input_ids, importance, **more):
    return (each.mean(1) * importance**2).sum() / (importance**2).sum()


def of_long_texts(each, labels, input_ids, importance, **more):
    """A short text next to a long one adds nothing, as if this were a sum."""
    long = importance > 6
    return (each.mean(1) * long).sum() / long.sum().clamp(min=1)


def in_order(row):
    """Different lengths within each batch."""
    return 1 + row * 5 % 12


def sorted_by_length(row):
    """Each batch of up to four has one length."""
    return [12, 6, 3, 1][row // 4]


def in_turn(row):
    return [1, 12, 2, 1][row % 4]


def late(row):
    """Ignored labels occur from row 12 on, in whole batches."""
    return 12 if row < 12 else 2


def tagged(lengths, tags=5):
    generator, found = torch.Generator().manual_seed(5), []
    for row in range(COUNT):
        there = torch.arange(12) < lengths(row)
        labels = torch.randint(1, tags, (12,), generator=generator) * there
        if lengths(row) == 12:
            labels = labels.clamp(max=tags - 2)
        found.append(
            {
                "input_ids": torch.randint(1, 200, (12,), generator=generator),
                "labels": labels,
                "attention_mask": there.long(),
                "importance": torch.tensor(float(lengths(row))),
                "times": torch.tensor(lengths(row)),
            }
        )
    return found


def run(folder, model, data, size, b=8, **more):
    watch = Watch()
    found = trainer(
        folder, model, data, b=b, watch=[watch], per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size, remove_unused_columns=False, **more,
    )  # fmt: skip
    return found, watch


def assert_whole(watch, model, data):
    """Check that each step of eight was one micro-batch with the loss of all its examples."""
    assert len(watch.gradients) == len(data) // 8
    for step, found in enumerate(watch.gradients):
        (wanted,) = reference.microbatch_gradients(
            lambda batch: model(**batch)["loss"], list(model.parameters()),
            [stacked(data, range(8 * step, 8 * step + 8))],
        )  # fmt: skip
        properties.assert_close(found, wanted, 1e-5)


@pytest.mark.sample(7)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("lengths", [in_order, sorted_by_length, late])
@pytest.mark.parametrize(
    "loss",
    [without_0, without_0_or_nothing, without_4, of_all, of_mask, of_importance, of_times],
)
def test_unlikely_denominators_are_found(tmp_path, loss, lengths, size):
    data = tagged(lengths)
    trained, watch = run(tmp_path, Tagger(loss), data, size)
    trained.train()
    assert_whole(watch, trained.model, data)


@pytest.mark.sample(8)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [in_order, in_turn, sorted_by_length, late])
@pytest.mark.parametrize("loss", [of_tags, of_rare_words, of_squares, of_long_texts])
def test_unknown_denominators_are_refused(tmp_path, loss, lengths, size):
    trained, _ = run(tmp_path, Tagger(loss), tagged(lengths), size)
    with pytest.raises(NotImplementedError, match="neither a mean|do not tell"):
        trained.train()
    assert all(parameter.grad is None for parameter in trained.model.parameters())


class Tasks(nn.Module):
    """Regression with many targets per example, some of them missing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 12)

    def forward(self, x, labels):
        there = ~labels.isnan()
        return {"loss": ((self.head(x) - labels.nan_to_num()) ** 2)[there].mean()}


@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("lengths", [in_order, sorted_by_length, late])
def test_missing_numbers_do_not_count(tmp_path, lengths, size):
    generator, data = torch.Generator().manual_seed(3), []
    for row in range(COUNT):
        labels = torch.randn(12, generator=generator)
        labels[lengths(row) :] = float("nan")
        data.append({"x": torch.randn(4, generator=generator), "labels": labels})
    trained, watch = run(tmp_path, Tasks(), data, size)
    trained.train()
    assert_whole(watch, trained.model, data)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_masked_images(tmp_path, size):
    """A stock loss without labels: the input is the target."""
    torch.manual_seed(0)
    model = ViTForMaskedImageModeling(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            encoder_stride=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    data = [
        {
            "pixel_values": torch.randn(1, 8, 8),
            "bool_masked_pos": (torch.randperm(16) < [12, 3, 8, 1][row % 4]).long(),
        }
        for row in range(8)
    ]
    trained, watch = run(tmp_path, model, data, size)
    trained.train()
    assert_whole(watch, trained.model, data)


@pytest.mark.parametrize("loss", [of_all, without_0])
def test_texts_that_do_not_fit_together_do_not_tell(tmp_path, loss):
    """One text per batch, no two of one length: nothing can be compared."""
    data = [
        {name: value[: 4 + row] for name, value in example.items() if value.dim()}
        for row, example in enumerate(tagged(lambda row: 12)[:8])
    ]
    trained, _ = run(tmp_path, Tagger(loss), data, 1)
    with pytest.raises(NotImplementedError, match="these batches do not tell"):
        trained.train()
    assert all(parameter.grad is None for parameter in trained.model.parameters())


def test_the_same_example_again_needs_no_comparison(tmp_path):
    data = tagged(lambda row: 7)[:1] * 8
    trained, watch = run(tmp_path, Tagger(without_0), data, 1)
    trained.train()
    assert_whole(watch, trained.model, data)


def test_measurements_become_rare(tmp_path):
    """While nothing is new, batches are compared less and less often."""
    calls = []

    def counted(each, *args, **more):
        calls.append(len(each))
        return each.mean()

    trained, _ = run(tmp_path, Tagger(counted), tagged(in_order) * 8, 1)
    trained.train()
    assert len(calls) < 8 * COUNT + 90
    assert calls[-20:] == [1] * 20


class Whole(torch.utils.data.Dataset):
    """Yields whole batches."""

    def __init__(self, data, size):
        self.batches = [stacked(data, range(i, i + size)) for i in range(0, len(data), size)]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


class Loading(Ordered):
    def get_train_dataloader(self):
        loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=None)
        return self.accelerator.prepare(loader)


def the_first(features):
    return features[0]


def two_rows(features):
    """Two consecutive rows per example."""
    return {key: torch.stack([f[key] for f in features for _ in "ab"]) for key in features[0]}


@pytest.mark.parametrize("b", [2, 16])
def test_whole_batches_are_refused_by_name(tmp_path, b):
    trained, _ = run(
        tmp_path, Tagger(of_all), Whole(tagged(in_order), 8), 1, b,
        clip={"data_collator": the_first},
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="8 rows out of 1 example .* batch_size=None"):
        trained.train()


def test_whole_batches_from_a_loader(tmp_path):
    """As the error recommends."""
    data, watch = tagged(in_order), Watch()
    trained = trainer(
        tmp_path, Tagger(of_all), Whole(data, 8), kind=Loading, b=2, watch=[watch],
        per_device_train_batch_size=1, gradient_accumulation_steps=1, remove_unused_columns=False,
    )  # fmt: skip
    trained.train()
    model = trained.model
    for step, found in enumerate(watch.gradients):
        pieces = [stacked(data, range(i, i + 2)) for i in range(8 * step, 8 * step + 8, 2)]
        wanted = clipped(model, lambda model, batch: model(**batch)["loss"], pieces, [2] * 4)
        properties.assert_close(found, wanted, 1e-5)
    assert len(watch.gradients) == 2


@pytest.mark.parametrize("b", [2, 16])
def test_several_rows_per_example_are_refused_by_name(tmp_path, b):
    trained, _ = run(
        tmp_path, Tagger(of_all), tagged(in_order), 8, b, clip={"data_collator": two_rows}
    )
    with pytest.raises(NotImplementedError, match="16 rows out of 8 examples .* second dimension"):
        trained.train()
