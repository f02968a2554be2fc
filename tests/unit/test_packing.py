"""Packed batches: finding documents, unpacking them, and training on each document."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from microclip import Clipper, packing, rules
from microclip.packing import PackingError, documents_in, is_packed, unpack

import reference

DOCUMENTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [14, 15, 16, 17, 18], [19, 20, 21]]


def tables(*rows):
    return torch.tensor(rows)


def packed_by_hand():
    """Two rows of documents, the second one with padding."""
    return {
        "input_ids": tables([5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]),
        "labels": tables([-100, 6, 7, 8, -100, 10], [-100, 12, -100, 14, -100, -100]),
        "position_ids": tables([0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 0, 0]),
    }


def test_position_ids_say_where_documents_are():
    found = documents_in(packed_by_hand())
    assert (found.rows, found.starts, found.lengths) == ((0, 0, 1, 1), (0, 4, 0, 2), (4, 2, 2, 2))
    assert found.labels(["a", "b"]) == ["a", "a", "b", "b"]


def test_unpacked_by_hand():
    found = unpack(packed_by_hand())
    assert found["input_ids"].tolist() == [
        [5, 6, 7, 8],
        [9, 10, 0, 0],
        [11, 12, 0, 0],
        [13, 14, 0, 0],
    ]
    assert found["labels"][1].tolist() == [-100, 10, -100, -100]
    assert found["attention_mask"].tolist()[1] == [1, 1, 0, 0]
    assert found["position_ids"][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "marks",
    [
        {"cu_seq_lens_q": torch.tensor([0, 4, 6, 8, 10, 11, 12], dtype=torch.int32)},
        {"seq_idx": tables([0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 2, 3])},
        {"document_ids": tables([7, 7, 7, 7, 1, 1], [7, 7, 3, 3, 0, 0]),
         "attention_mask": tables([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0])},
        {"seq_lengths": [[4, 2], [2, 2]]},
    ],
)  # fmt: skip
def test_other_marks_say_the_same(marks):
    batch = packed_by_hand()
    alone = {name: each for name, each in batch.items() if name != "position_ids"}
    assert (
        documents_in({**alone, **marks}) == documents_in(batch) == documents_in({**batch, **marks})
    )
    assert not set(marks) - {"attention_mask"} & set(unpack({**batch, **marks}))


def test_marks_that_disagree_are_refused():
    with pytest.raises(PackingError, match="seq_lengths and position_ids disagree"):
        documents_in({**packed_by_hand(), "seq_lengths": [[3, 3], [2, 2]]})


def test_a_batch_without_marks_is_refused():
    batch = packed_by_hand()
    del batch["position_ids"]
    assert not is_packed(batch)
    with pytest.raises(PackingError, match="Nothing in this batch says where documents start"):
        unpack(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8, 12])}, "crosses the end of row 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "must rise from 0 to 12"),
        ({"seq_lengths": [[4, 9], [2, 2]]}, "lengths of the documents of each of 2 rows"),
        ({"position_ids": torch.zeros(3, 2, 6)}, "must have shape"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, "must have shape"),
        ({"attention_mask": tables([1] * 6, [1, 1, 2, 2, 0, 0])}, "numbers the documents"),
        ({"attention_mask": tables([1, 0, 1, 1, 1, 1], [1] * 6)}, "in the middle of a document"),
        ({"task": torch.tensor([1, 2])}, "2 entries, but the 2 rows hold 4 documents"),
        ({"attention_mask": torch.zeros(2, 6)}, "every token is padding"),
        ({"attention_mask": tables([0.0] * 6, [0.0] * 4 + [-1e9] * 2)}, "but holds -1e\\+09"),
        ({"extra": {"weights": torch.ones(2, 6)}}, "is a dict, which cannot be cut"),
        ({"extra": np.ones((2, 6))}, "is a ndarray, which cannot be cut"),
    ],
)
def test_what_cannot_be_unpacked_is_refused(change, message):
    with pytest.raises(PackingError, match=message):
        unpack({**packed_by_hand(), **change})


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize(
    "marks",
    [
        {"seq_lengths": [[3, 2]]},
        {"seq_idx": tables([0] * 3 + [1] * 5), "attention_mask": tables([1] * 5 + [0] * 3)},
    ],
)
def test_labels_outside_documents_are_refused(name, marks):
    labels = tables([-100, 6, 7, -100, 9, -100, 11, 12])
    batch = {"input_ids": tables(range(5, 13)), name: labels, **marks}
    with pytest.raises(PackingError, match=r"2 tokens .* have labels, first token 6 of row 0"):
        unpack(batch)


def test_entries_per_document_are_kept():
    found = unpack({**packed_by_hand(), "task": torch.tensor([1, 2, 3, 4]), "text": list("abcd")})
    assert found["task"].tolist() == [1, 2, 3, 4]
    assert found["text"] == list("abcd")


def test_entries_that_may_be_per_row_are_refused():
    """As many documents as rows, but not one in each."""
    batch = {
        "input_ids": tables([5, 6, 7, 8], [9, 0, 0, 0]),
        "labels": tables([-100, 6, -100, 8], [-100] * 4),
        "position_ids": tables([0, 1, 0, 1], [0, 0, 0, 0]),
    }
    assert documents_in(batch).rows == (0, 0)
    for entries in (torch.tensor([1.0, 2.0]), ["a", "b"]):
        with pytest.raises(PackingError, match="may be one per row or one per document"):
            unpack({**batch, "weight": entries})


def test_entries_of_a_document_that_counts_as_padding_are_refused():
    batch = {
        "input_ids": tables([5, 6, 7, 8]),
        "labels": tables([-100, 6, 7, -100]),
        "position_ids": tables([0, 1, 2, 0]),
    }
    with pytest.raises(PackingError, match="2 entries, but the 1 rows hold 1 documents"):
        unpack({**batch, "weight": torch.tensor([1.0, 2.0])})
    assert unpack({**batch, "weight": [1.0], "task": "chat", "step": 3})["weight"] == [1.0]


def test_labels_of_any_name_are_padded_with_the_label_to_ignore():
    names = {"shift_labels": [6, 7, -100, 9, -100], "label_mask": [1] * 5, "label_ids": [1] * 5}
    batch = {"input_ids": tables([5, 6, 7, 8, 9]), "position_ids": tables([0, 1, 2, 0, 1])}
    batch |= {name: tables(each) for name, each in names.items()}
    batch |= {"label_weights": torch.ones(1, 5)}
    for padding in ({}, {"input_ids": 3}):
        found = unpack(batch, padding=padding)
        padded = {name: each[1, 2].item() for name, each in found.items()}
        assert padded == {
            "input_ids": padding.get("input_ids", 0), "position_ids": 0, "shift_labels": -100,
            "label_mask": 0, "label_ids": -100, "label_weights": 0, "attention_mask": 0,
        }  # fmt: skip


@pytest.mark.parametrize(
    "numbers",
    [
        {"document_ids": tables([1, 1, 1, 2, 2, 0, 0, 0])},
        {"seq_idx": tables([0, 0, 0, 1, 1, -1, -1, -1])},
        {"seq_idx": tables([0, 0, 0, 1, 1, 0, 0, -1])},
        {
            "document_ids": tables([1, 1, 1, 2, 2, 0, 0, 0]),
            "position_ids": tables([0, 1, 2, 0, 1, 2, 3, 4]),
        },
    ],
)
def test_numbers_of_padding(numbers):
    labels = tables([-100, 6, 7, -100, 9, -100, -100, -100])
    batch = {"input_ids": tables(range(5, 13)), "labels": labels, **numbers}
    assert documents_in(batch).lengths == (3, 2)


def test_the_number_0_may_be_that_of_a_document():
    ids, numbers = tables([5, 6, 7, 8], [9, 10, 11, 12]), tables([1, 1, 0, 0], [0, 0, 0, 0])
    batch = {"input_ids": ids, "document_ids": numbers}
    labelled = tables([-100, 6, -100, 8], [-100, 10, 11, 12])
    assert documents_in({**batch, "labels": labelled}).lengths == (2, 2, 4)
    assert documents_in({**batch, "labels": tables([-100, 6, -100, -100], [-100] * 4)}).rows == (0,)
    from_zero = {"input_ids": ids, "seq_idx": tables([0, 0, 1, 1], [0, 0, 0, 0])}
    assert documents_in({**from_zero, "labels": torch.full((2, 4), -100)}).rows == (0, 0, 1)
    with pytest.raises(PackingError, match="Row 0 of .* has the number 0 at token 2"):
        documents_in(batch)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_mask": tables([1] * 6, [1, 1, 2, 2, 0, 0])},
        {"attention_mask": tables([0.0] * 6, [0.0] * 4 + [-1e9] * 2)},
        {"labels": None, "document_ids": tables([1] * 4 + [2] * 2, [1, 1, 2, 2, 0, 0])},
        {"labels": None, "document_ids": tables([1] * 4 + [2] * 2, [1, 1, -7, -7, 5, 5])},
    ],
)
def test_unclear_padding_does_not_pass_for_an_unpacked_batch(change):
    with pytest.raises(PackingError):
        is_packed({**packed_by_hand(), **change})


def test_documents_do_not_override_the_mask():
    batch = packed_by_hand()
    documents = documents_in(batch)
    with pytest.raises(PackingError, match="must have shape"):
        unpack({**batch, "attention_mask": torch.ones(2, 1, 6, 6)}, documents)
    with pytest.raises(PackingError, match="hides tokens of the documents"):
        unpack({**batch, "attention_mask": tables([1] * 5 + [0], [1] * 6)}, documents)


def test_one_document_per_row_is_not_packed():
    batch = {
        "input_ids": tables([1, 2, 3], [4, 5, 0]),
        "position_ids": tables([0, 1, 2], [0, 1, 2]),
    }
    assert not is_packed(batch)
    assert unpack(batch)["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]


def tiny(kind, attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    elif kind == "Llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=24)
    else:
        config = transformers.Qwen2Config(**sizes, intermediate_size=24, num_key_value_heads=1)
    config._attn_implementation = attention
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config).double()


def losses_fn(model):
    def losses(batch):
        inputs = {name: each for name, each in batch.items() if name != "labels"}
        logits = model(**inputs).logits
        labels = batch["labels"][:, 1:]
        each = F.cross_entropy(logits[:, :-1].mT, labels, reduction="none", ignore_index=-100)
        return each.sum(1) / (labels != -100).sum(1).clamp(min=1)

    return losses


def flattened(style):
    """The documents as real collators pack them."""
    features = [{"input_ids": each, "labels": each} for each in DOCUMENTS]
    if style == "transformers":
        transformers = pytest.importorskip("transformers")
        make = transformers.DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True
        )
        return make(features, return_tensors="pt")
    collators = pytest.importorskip("trl.trainer.sft_trainer")
    collate = collators.DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=True, pad_to_multiple_of=8
    )
    rows = []
    for packed in (DOCUMENTS[:2], DOCUMENTS[2:]):
        ids = list(chain.from_iterable(packed))
        rows.append({"input_ids": ids, "labels": ids, "seq_lengths": list(map(len, packed))})
    return collate(rows)


@pytest.mark.parametrize(
    "style",
    ["transformers", pytest.param("trl", marks=pytest.mark.full)],  # slow to import
)
def test_collators(style):
    batch = dict(flattened(style))
    assert batch["input_ids"].shape[0] == 1
    assert is_packed(batch)
    found = unpack(batch)
    texts = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(found["input_ids"], found["attention_mask"], strict=True)
    ]
    assert texts == DOCUMENTS
    assert set(found) == {"input_ids", "labels", "position_ids", "attention_mask"}


KINDS = [
    ("Llama", "sdpa"),
    ("Llama", "eager"),
    ("Qwen2", "sdpa"),
    ("GPT2", "eager"),
    ("GPT2", "sdpa"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "attention"), KINDS)
def test_transformers_keep_packed_documents_apart(kind, attention):
    """Position ids alone do it; with a cache or a mask of ones, documents leak into others."""
    model = tiny(kind, attention).eval()
    batch = {name: flattened("transformers")[name] for name in ("input_ids", "position_ids")}

    def logits(batch, **options):
        return model(**batch, **options).logits

    without_cache = partial(logits, use_cache=False)
    packing.check_separate(without_cache, batch, 1e-5)  # rotations and softmax are float32
    mask = torch.ones_like(batch["input_ids"])
    for leaks, each in ((logits, batch), (without_cache, {**batch, "attention_mask": mask})):
        with pytest.raises(PackingError, match="Packed documents are not separate"):
            packing.check_separate(leaks, each, 1e-5)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("kind", "attention"), KINDS[::2])
@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused", "auto"])
@pytest.mark.parametrize("b", [1, 2])
def test_gradients_are_per_document(kind, attention, engine, b):
    """The twin has every document on its own, without padding."""
    model = tiny(kind, attention)
    names, parameters = zip(*model.named_parameters(), strict=True)
    losses = losses_fn(model)

    def mean(documents):
        rows = [
            {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])} for ids in documents
        ]
        return torch.stack([losses(row)[0] for row in rows])

    cut = [DOCUMENTS[start : start + b] for start in range(0, len(DOCUMENTS), b)]
    gradients = reference.microbatch_gradients(mean, parameters, cut)
    wanted, norms, _ = reference.clipped_gradient(
        gradients, [len(each) for each in cut], reference.WEIGH["MinNorm()"]
    )
    batch = flattened("transformers")
    ids = [f"document {number}" for number in range(len(DOCUMENTS))]
    outcome = Clipper(model, b, engine=engine).backward(losses, unpack(batch), ids=ids)
    assert list(chain.from_iterable(outcome.ids)) == ids
    torch.testing.assert_close(outcome.norms.tolist(), norms, rtol=1e-9, atol=0)
    for name, parameter, each in zip(names, parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, each, rtol=1e-9, atol=1e-12, msg=name)


def test_the_whole_packed_batch_is_plain_training():
    """With one micro-batch, the gradient is that of the packed row."""
    model = tiny("Llama", "sdpa")
    batch = flattened("transformers")
    tokens = {name: batch[name] for name in ("input_ids", "position_ids")}
    logits = model(**tokens, use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    F.cross_entropy(logits.mT, labels, ignore_index=-100, reduction="sum").backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def sums(batch):
        labels = batch["labels"][:, 1:]
        inputs = {name: each for name, each in batch.items() if name != "labels"}
        each = model(**inputs).logits[:, :-1].mT
        return F.cross_entropy(each, labels, ignore_index=-100, reduction="none").sum(1)

    Clipper(model, None).backward(sums, unpack(batch))
    for parameter, each in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad * len(DOCUMENTS), each, rtol=1e-5, atol=1e-5)


def test_two_pieces_of_one_document_share_its_id():
    """A document that packing cut in two has one record."""
    model = tiny("Llama", "sdpa")
    batch = unpack(flattened("transformers"))
    rule = rules.LossHistory()
    clipper = Clipper(model, 1, rule=rule)
    for _ in range(3):
        outcome = clipper.backward(losses_fn(model), batch, ids=["a", "a", "b", "c", "d"])
    assert list(chain.from_iterable(outcome.ids)) == ["a", "a", "b", "c", "d"]
    assert len(rule.table) == 4
