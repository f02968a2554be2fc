"""Columns with the examples' domains and ids, in every kind of data set and loader."""

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast
from transformers.data.data_collator import default_data_collator

from microclip import Ledger
from microclip.integrations.columns import ColumnCollator, decode_strings
from microclip.ledger import open_ledger

from trainers import Ordered, bert, examples, trainer

PLACES = ["sea", "wood", "town"]
BOTH = {"domain_column": "place", "id_column": "name"}


def with_columns(place=lambda row: PLACES[row % 3], name=lambda row: f"text {row}", **more):
    return [
        {**example, "place": place(row), "name": name(row), **more}
        for row, example in enumerate(examples("bert"))
    ]


class Table(torch.utils.data.Dataset):
    """Knows its columns, like a `datasets.Dataset`."""

    def __init__(self, rows):
        self.rows = rows
        self.column_names = list(rows[0])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def assert_named(run, ids=None, places=PLACES):
    outcome = run.clipper.outcome
    ids = ids or [f"text {row}" for row in range(16, 22)]
    assert sorted(name for names in outcome.ids for name in names) == sorted(ids)
    assert set(outcome.domains) == set(places)


@pytest.mark.parametrize(
    ("data", "remove", "workers"),
    [(list, True, 0), (list, False, 0), (Table, True, 0), (Table, False, 0), (list, True, 2)],
)
def test_strings(tmp_path, data, remove, workers):
    run = trainer(
        tmp_path, bert(), data(with_columns()), b=2, clip=BOTH, remove_unused_columns=remove,
        dataloader_num_workers=workers,
    )  # fmt: skip
    run.train()
    assert_named(run)


def test_strings_of_a_stream(tmp_path):
    run = trainer(tmp_path, bert(), Stream(with_columns()), b=2, clip=BOTH, max_steps=3)
    run.train()
    assert_named(run)


@pytest.mark.parametrize(
    ("place", "places"),
    [
        (lambda row: torch.tensor(row % 2), [0, 1]),
        (lambda row: np.int64(row % 2), [0, 1]),
        (lambda row: np.array(row % 2), [0, 1]),
        (lambda row: bool(row % 2), [False, True]),
        (lambda row: 0.5 * (row % 2), [0.0, 0.5]),
        (lambda row: np.str_(PLACES[row % 2]), PLACES[:2]),
    ],
    ids=["tensor", "numpy", "array", "bool", "float", "numpy-text"],
)
def test_other_labels(tmp_path, place, places):
    run = trainer(tmp_path, bert(), with_columns(place), b=2, clip=BOTH)
    run.train()
    assert_named(run, places=places)


@pytest.mark.sample(4)
@pytest.mark.parametrize("data", [list, Table, Stream], ids=["list", "table", "stream"])
@pytest.mark.parametrize("column", ["domain_column", "id_column"])
@pytest.mark.parametrize("remove", [True, False])
def test_a_column_that_is_not_there(tmp_path, data, column, remove):
    run = trainer(
        tmp_path, bert(), data(with_columns()), b=2, clip={column: "plaice"}, max_steps=1,
        remove_unused_columns=remove,
    )  # fmt: skip
    match = "no column 'plaice'.*Its columns: 'input_ids', 'labels', 'place', 'name'"
    with pytest.raises(ValueError, match=match):
        run.train()


def test_a_column_with_gaps(tmp_path):
    data = with_columns()
    del data[5]["place"]
    run = trainer(tmp_path, bert(), data, b=2, clip=BOTH)
    with pytest.raises(ValueError, match="Column 'place' must hold one string or number .* None"):
        run.train()


@pytest.mark.parametrize("value", [["sea", "wood"], None, {"a": 1}, torch.ones(2)])
def test_a_column_of_something_else(tmp_path, value):
    run = trainer(tmp_path, bert(), with_columns(lambda row: value), b=2, clip=BOTH)
    with pytest.raises(ValueError, match="'place' must hold one string or number per example"):
        run.train()


def test_ids_that_are_hashes_without_a_sign(tmp_path):
    data = with_columns(name=lambda row: np.uint64(2**63 + row))
    run = trainer(tmp_path, bert(), data, b=2, clip=BOTH)
    with pytest.raises(ValueError, match="'name' has the integer 9223372036854775808.*strings"):
        run.train()


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0, "a": 1}, unk_token="a")),
        pad_token="[PAD]",
    )


@pytest.mark.parametrize("remove", [True, False])
def test_a_collator_that_pads(tmp_path, remove):
    """It would fail on strings."""
    data = with_columns()
    for row, example in enumerate(data):
        example["input_ids"] = example["input_ids"][: 3 + row % 4].tolist()
    run = trainer(
        tmp_path, bert(), data, b=2, remove_unused_columns=remove,
        clip={**BOTH, "data_collator": DataCollatorWithPadding(tokenizer())},
    )  # fmt: skip
    run.train()
    assert_named(run)


def test_a_collator_that_needs_the_column(tmp_path):
    seen = []

    def collate(features):
        seen.extend(feature["place"] for feature in features)
        return default_data_collator(features)

    run = trainer(tmp_path, bert(), with_columns(), b=2, remove_unused_columns=False,
                  clip={**BOTH, "data_collator": collate})  # fmt: skip
    run.train()
    assert set(seen) == set(PLACES)
    assert_named(run)


def test_a_column_that_the_model_takes_as_well(tmp_path):
    """Domains by label; the model still gets its labels."""
    run = trainer(tmp_path, bert(), examples("bert"), b=2, clip={"domain_column": "labels"})
    run.train()
    assert set(run.clipper.outcome.domains) <= {0, 1, 2}
    assert run.clipper.outcome.loss > 0


def test_one_column_for_both(tmp_path):
    clip = {"domain_column": "place", "id_column": "place"}
    run = trainer(tmp_path, bert(), with_columns(), b=2, clip=clip)
    run.train()
    assert_named(run, ids=[PLACES[row % 3] for row in range(16, 22)])


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("place", [lambda row: PLACES[row % 3], lambda row: row % 2])
def test_evaluation_ignores_them(tmp_path, remove, place):
    data = with_columns(place)
    run = trainer(tmp_path, bert(), data, b=2, clip=BOTH, remove_unused_columns=remove)
    run.eval_dataset = data
    assert run.evaluate()["eval_loss"] > 0
    assert len(run.predict(data).predictions) == len(data)
    run.train()
    assert run.evaluate()["eval_loss"] > 0


def test_the_trainers_collator_stays_what_it_was(tmp_path):
    run = trainer(tmp_path, bert(), with_columns(), b=2, clip=BOTH)
    run.train()
    assert run.data_collator is default_data_collator
    assert not {"place", "name"} & set(run._signature_columns)


def test_features_that_are_objects(tmp_path):
    class Feature:
        def __init__(self, fields):
            vars(self).update(fields)

    run = trainer(tmp_path, bert(), [Feature(fields) for fields in with_columns()], b=2, clip=BOTH)
    run.train()
    assert_named(run)


def test_strings_in_a_ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    run = trainer(tmp_path, bert(), with_columns(), b=2, clip={**BOTH, "ledger": ledger})
    run.train()
    rows = [r for part in open_ledger(ledger.path).microbatches() for r in part.to_pylist()]
    assert {name for row in rows for name in row["ids"]} == {f"text {row}" for row in range(22)}
    assert {row["domain"] for row in rows} == set(PLACES)


def test_strings_name_the_examples_of_a_larger_microbatch(tmp_path):
    run = trainer(tmp_path, bert(), with_columns(), b=8, clip={"id_column": "name"})
    run.train()
    assert run.clipper.outcome.ids == (tuple(f"text {row}" for row in range(16, 22)),)


def test_a_custom_loader_without_the_column(tmp_path):
    class Loading(Ordered):
        def get_train_dataloader(self):
            rows = [{k: v for k, v in row.items() if k != "place"} for row in self.train_dataset]
            collate = lambda features: default_data_collator(features)  # noqa: E731
            loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
            return self.accelerator.prepare(loader)

    clip = {"domain_column": "place"}
    run = trainer(tmp_path, bert(), with_columns(), kind=Loading, b=2, clip=clip)
    with pytest.raises(ValueError, match="no column 'place'.*Its columns: '(labels|input_ids)', "):
        run.train()


def test_strings_that_are_sent_from_rank_to_rank():
    """If one rank loads an iterable data set for all, batches must consist of tensors."""
    model_inputs = frozenset({"input_ids", "labels"})
    collate = ColumnCollator(
        default_data_collator,
        ("place", "name"),
        model_inputs,
        hide=True,
        add_to_batch=True,
        as_tensors=True,
    )
    batch = collate(with_columns(place=lambda row: row % 2)[:3])
    assert all(isinstance(value, torch.Tensor) for value in batch.values())
    assert decode_strings(torch.cat([batch["name"], batch["name"]])[1:4]) == [
        "text 1",
        "text 2",
        "text 0",
    ]
    assert decode_strings(batch["place"]).tolist() == [0, 1, 0]
    long = with_columns(name=lambda row: "x" * 257)
    with pytest.raises(ValueError, match="Column 'name' .* longer than 256 bytes"):
        collate(long)
