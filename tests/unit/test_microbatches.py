"""Cutting batches: structures, ragged ends, domains, ids, and what cannot be cut."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from microclip.batches import count_examples
from microclip.microbatches import check_size, cut

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str
    made: int = field(init=False, default=3)

    def __post_init__(self):
        if len(self.x) == 1:
            raise AssertionError("a check meant for whole batches must not see micro-batches")


X = torch.arange(10).reshape(5, 2)


@pytest.mark.parametrize(
    ("batch", "look"),
    [
        (X, lambda m: m),
        ((X, "text"), lambda m: m[0]),
        ([X, None], lambda m: m[0]),
        ({"x": X, "n": 3}, lambda m: m["x"]),
        (OrderedDict(x=X), lambda m: m["x"]),
        (MappingProxyType({"x": X}), lambda m: m["x"]),
        (BatchEncoding({"input_ids": X}), lambda m: m.input_ids),
        (Pair(X, torch.tensor(1.0)), lambda m: m.x),
        (Frozen(X, "n"), lambda m: m.x),
        ({"deep": [(X, {"er": X})]}, lambda m: m["deep"][0][1]["er"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structures_keep_their_type(batch, look):
    pieces = cut(batch, 2)
    assert [piece.size for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([look(piece.batch) for piece in pieces]), X)
    if not isinstance(batch, MappingProxyType):
        assert all(type(piece.batch) is type(batch) for piece in pieces)
    if not isinstance(batch, Tensor):
        assert torch.equal(look(batch), X)  # the batch itself is left alone


def test_what_is_no_tensor_is_handed_on_whole():
    scalar, numbers = torch.tensor(2.0), [1, 2, 3]
    batch = {"x": X, "scalar": scalar, "numbers": numbers, "name": "n", "none": None}
    for piece in cut(batch, 2):
        assert piece.batch["scalar"] is scalar
        assert piece.batch["numbers"] == numbers
        assert (piece.batch["name"], piece.batch["none"]) == ("n", None)


def test_neighbours_are_views():
    (first, *_) = cut(X, 2)
    assert first.batch.data_ptr() == X.data_ptr()


def test_size_larger_than_the_batch():
    (only,) = cut(X, 100)
    assert only.size == 5


def test_domains_are_sorted_and_pure():
    pieces = cut(X, 2, domains=["b", "a", "b", "b", "a"])
    assert [piece.domain for piece in pieces] == ["a", "b", "b"]
    assert [piece.ids for piece in pieces] == [(1, 4), (0, 2), (3,)]
    assert pieces[1].batch.tolist() == X[[0, 2]].tolist()


def test_domains_and_ids_as_tensors():
    pieces = cut(X, None, domains=torch.tensor([1, 0, 1, 0, 0]), ids=torch.arange(100, 105))
    assert [(piece.domain, piece.ids) for piece in pieces] == [
        (0, (101, 103, 104)),
        (1, (100, 102)),
    ]


def test_positions_go_on_from_the_last_chunk():
    assert cut(X, None, first_position=5)[0].ids == (5, 6, 7, 8, 9)


@given(
    size=st.integers(1, 40),
    b=st.none() | st.integers(1, 50),
    labels=st.none() | st.lists(st.sampled_from("abc"), min_size=40, max_size=40),
)
def test_every_example_exactly_once(size, b, labels):
    batch = {"x": torch.arange(size), "y": torch.arange(size) * 2}
    domains = None if labels is None else labels[:size]
    pieces = cut(batch, b, domains=domains)
    seen = [i for piece in pieces for i in piece.ids]
    assert sorted(seen) == list(range(size))
    assert torch.cat([piece.batch["x"] for piece in pieces]).tolist() == seen
    for piece in pieces:
        assert piece.size == len(piece.ids) == len(piece.batch["y"])
        assert list(piece.ids) == sorted(piece.ids)  # stable: the given order is kept
        assert b is None or piece.size <= b
        assert domains is None or {domains[i] for i in piece.ids} == {piece.domain}
    for domain in {piece.domain for piece in pieces}:  # only the last of a domain is ragged
        sizes = [piece.size for piece in pieces if piece.domain == domain]
        assert len(set(sizes[:-1])) <= 1
        assert sizes[-1] <= sizes[0]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, r"batch\['x'\] has 4 and batch\['y'\] has 3"),
        ((torch.zeros(4), [torch.zeros(1, 4)]), r"batch\[0\] has 4 and batch\[1\]\[0\] has 1"),
        (Frozen((torch.zeros(2), torch.zeros(3)), "n"), r"batch\.x\[0\] has 2 and batch\.x\[1\]"),
        ("text", "no tensor with a first dimension in the batch of type str"),
        ({"x": torch.tensor(1.0)}, "no tensor with a first dimension in the batch of type dict"),
        ([], "no tensor"),
        (torch.zeros(0, 3), "The batch is empty: batch has 0 examples"),
    ],
)
def test_what_cannot_be_cut(batch, message):
    with pytest.raises(ValueError, match=message):
        count_examples(batch)


def test_packed_sequences_are_refused():
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(TypeError, match="pack them inside loss_fn"):
        cut((packed, torch.zeros(2)), 1)


@pytest.mark.parametrize("what", ["domains", "ids"])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a"], "5 examples, but {} has 1"),
        (torch.zeros(5, 1), r"{} must hold one label per example, but got a tensor of shape"),
        ("abcde", "{} must hold one label per example, but got 'abcde'"),
        ([1.0, 2.0, 3.0, 4.0, float("nan")], "{} contains NaN"),
    ],
)
def test_bad_labels(what, labels, message):
    with pytest.raises(ValueError, match=message.format(what)):
        cut(X, 2, **{what: labels})


def test_domains_that_cannot_be_sorted():
    with pytest.raises(TypeError, match="they mix int and str"):
        cut(X, 2, domains=["a", 1, "a", "a", 1])


@pytest.mark.parametrize("bad", [0, -1, 2.0, "4", True, float("nan"), [2]])
def test_bad_microbatch_sizes(bad):
    with pytest.raises(ValueError, match="positive integer or None, but got "):
        check_size(bad)


def test_good_microbatch_sizes():
    assert check_size(np.int64(4)) == 4
    assert check_size(None) is None


def test_modifying_one_container_does_not_change_the_others():
    batch = {"x": torch.arange(4.0), "labels": torch.arange(4)}
    cuts = cut(batch, 2)
    cuts.whole.pop("labels")
    cuts[0].batch.pop("labels")
    assert cuts.whole["labels"] is batch["labels"]
    assert cuts[0].batch["labels"].tolist() == [0, 1]
    assert cuts[1].batch["labels"].tolist() == [2, 3]


@pytest.mark.parametrize("ids", [3, "abcd", torch.zeros(4, 2)])
def test_ids_are_one_per_example(ids):
    with pytest.raises(ValueError, match="ids must hold one label per example, but got"):
        cut(torch.zeros(4, 2), 2, ids=ids)
