"""Packing and padding-free batches in TRL: every text is an example, as if nothing were packed."""

from itertools import chain

import datasets
import pytest
import torch
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from microclip import Ledger, rules
from microclip.ledger import open_ledger

import properties
import reference
import trl_runs

PACKED = {"packing": True, "max_length": 24, "per_device_train_batch_size": 2}
FREE = {"padding_free": True, "max_length": None}


def rows_of(run):
    """Return the packed rows of a trainer, each a list of its texts."""
    found = []
    for row in run.train_dataset:
        lengths, texts, start = row.get("seq_lengths", [len(row["input_ids"])]), [], 0
        for length in lengths:
            cut = slice(start, start + length)
            texts.append({name: row[name][cut] for name in ("input_ids", "labels")})
            start += length
        found.append(texts)
    return found


def stock_loss(run, texts):
    """Return the stock trainer's loss of some texts, padded."""
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(texts)
    return SFTTrainer.compute_loss(run, run.model, batch)


def microbatches(run, b):
    """Return, for every step, the texts of its micro-batches: batches are cut one by one."""
    rows, size = rows_of(run), run.args.per_device_train_batch_size
    batches = [list(chain(*rows[i : i + size])) for i in range(0, len(rows), size)]
    pieces = [[t[i : i + b] for i in range(0, len(t), b)] if b else [t] for t in batches]
    n = run.args.gradient_accumulation_steps
    return [list(chain(*pieces[i : i + n])) for i in range(0, len(pieces), n)]


def check(b, clip=None, kind="llama", **options):
    """Compare all steps with the stock loss of each micro-batch of texts; return the trainer."""
    clip = {"rule": rules.MinNorm(), **(clip or {})}
    run, found = trl_runs.clipped("sft", trl_runs.model(kind), b, clip=clip, **options)
    steps = microbatches(run, b)
    assert len(steps) == len(found)
    run.model.train()
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    for gradient, pieces in zip(found, steps, strict=True):
        each = reference.microbatch_gradients(lambda t: stock_loss(run, t), parameters, pieces)
        weigh, sizes = reference.WEIGH["MinNorm()"], [len(piece) for piece in pieces]
        twin = reference.clipped_gradient(each, sizes, weigh)[0]
        assert reference.norm(twin) > 0
        properties.assert_close(gradient, twin, 1e-5)
    return run


@pytest.mark.sample(37)
@pytest.mark.parametrize("engine", ["fused", "stream", "two_pass"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize(
    "options",
    [PACKED, {**PACKED, "packing_strategy": "bfd_split", "max_length": 7}, FREE,
     {**PACKED, "pad_to_multiple_of": 8}],
    ids=["bfd", "split", "padding-free", "multiples"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_text_is_an_example(kind, options, b, steps, engine):
    run = check(b, {"engine": engine}, kind, **options, gradient_accumulation_steps=steps)
    texts = sum(len(row) for row in rows_of(run))
    assert texts > (14 if "packing_strategy" in options else 13)
    if len(run.clipper.outcome) > 1:  # the last step may have a single micro-batch
        assert run.clipper.outcome.engine == engine


@pytest.mark.sample(5)
@pytest.mark.parametrize("options", [PACKED, FREE], ids=["bfd", "padding-free"])
@pytest.mark.parametrize("b", [1, None])
@pytest.mark.parametrize("steps", [1, 2])
def test_without_clipping_it_is_the_stock_packed_trainer(options, b, steps):
    """Which computes packed rows as they are; a mean over the step's tokens."""
    weights = []
    for clip in (None, {"microbatch_size": b, "rule": rules.Keep(), "loss_mean": "step"}):
        net = trl_runs.model("llama")
        trl_runs.trainer(
            "sft", net, clip=clip, learning_rate=0.05, optim="sgd", num_train_epochs=2, **options,
            gradient_accumulation_steps=steps,
        ).train()  # fmt: skip
        weights.append([p.detach().clone() for p in net.parameters()])
    for one, other, start in zip(*weights, trl_runs.model("llama").parameters(), strict=True):
        assert not torch.equal(one, start)
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_mean_over_the_step_counts_no_first_token():
    """GPT-2's Trainer counts all labels, but in a packed row the first of each text is none."""
    losses = []
    for clip in (None, {"microbatch_size": 1, "rule": rules.Keep(), "loss_mean": "step"}):
        run = trl_runs.trainer(
            "sft", trl_runs.model("gpt2"), clip=clip, completion_only_loss=False,
            logging_strategy="steps", logging_steps=1, **PACKED,
        )  # fmt: skip
        run.train()
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def texts_by_id(data):
    words = trl_runs.tokenizer()
    texts = [row["prompt"] + row["completion"] + "<eos>" for row in data]
    return dict(zip(data["id"], [words(text)["input_ids"] for text in texts], strict=True))


@pytest.mark.sample(5)
@pytest.mark.parametrize("names", ["numbers", "strings"])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
@pytest.mark.parametrize("streaming", [False, True])
def test_ids_and_domains_are_packed_with_their_texts(tmp_path, strategy, streaming, names):
    data, length = trl_runs.data("sft"), 24 if strategy == "bfd" else 7
    if names == "strings":
        ids = [f"text {i}" for i in data["id"]]
        data = data.remove_columns("id").add_column("id", ids)
    of_id, place = texts_by_id(data), dict(zip(data["id"], data["place"], strict=True))
    clip = {
        "id_column": "id", "domain_column": "place", "microbatch_size": 1,
        "ledger": Ledger(tmp_path),
    }  # fmt: skip
    given = data.to_iterable_dataset() if streaming else data
    options = {"packing_strategy": strategy, "max_length": length, "max_steps": 20}
    run = trl_runs.trainer(
        "sft", trl_runs.model("llama"), clip=clip, examples=given, shuffle_dataset=True,
        **{**PACKED, **options},
    )  # fmt: skip
    for row in run.train_dataset:
        start = 0
        for name, where, n in zip(row["id"], row["place"], row["seq_lengths"], strict=True):
            whole, cut = of_id[name], row["input_ids"][start : start + n]
            pieces = [whole[i : i + length] for i in range(0, len(whole), length)]
            assert cut in pieces
            assert where == place[name]
            start += n
    run.train()
    tables = open_ledger(tmp_path).microbatches()
    rows = [row for part in tables for row in part.to_pylist()]
    assert {name for row in rows for name in row["ids"]} == set(of_id)
    assert all(row["domain"] == place[row["ids"][0]] for row in rows)


def test_a_rule_that_remembers_texts():
    """Its losses are the stock loss of each text alone."""
    seen = {}

    class Watching(rules.LossHistory):
        def remember(self, shown):
            seen.update(zip(shown.keys.tolist(), shown.losses.tolist(), strict=True))
            super().remember(shown)

    clip = {"rule": Watching(total_steps=100), "id_column": "id"}
    run = trl_runs.trainer("sft", trl_runs.model("llama"), clip=clip, **PACKED)
    run.train()
    assert set(seen) == set(range(100, 114))
    for row, texts in zip(run.train_dataset["id"], rows_of(run), strict=True):
        for name, text in zip(row, texts, strict=True):
            assert seen[name] == pytest.approx(stock_loss(run, [text]).item(), rel=1e-5)


@pytest.mark.parametrize("clip", [{}, {"ledger": None}])
def test_one_microbatch_per_batch_is_not_unpacked(clip):
    """The stock trainer bit for bit, without padding."""
    weights = []
    for each in (None, clip):
        net = trl_runs.model("llama")
        trl_runs.trainer("sft", net, clip=each, learning_rate=0.05, **PACKED).train()
        weights.append([p.detach().clone() for p in net.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


WRAPPED = {**PACKED, "packing_strategy": "wrapped", "max_length": 16}


@pytest.mark.parametrize("b", [1, 2])
def test_rows_of_joined_texts_are_examples(b):
    options = {**WRAPPED, "per_device_train_batch_size": 4}
    trl_runs.check("sft", trl_runs.model("llama"), b, **options)


@pytest.mark.parametrize(
    ("clip", "message"),
    [({"id_column": "id"}, "no id and no domain: id_column='id' is not possible"),
     ({"domain_column": "place"}, "domain_column='place' is not possible. .*\"bfd\""),
     ({"rule": rules.LossHistory()}, r"rule=LossHistory\(\) is not possible")],
)  # fmt: skip
def test_joined_texts_have_no_ids(clip, message):
    with pytest.raises(NotImplementedError, match=message):
        trl_runs.trainer("sft", trl_runs.model("llama"), clip=clip, **WRAPPED)


def test_a_data_set_packed_before():
    """Lists of ids go with its rows; one id for a whole row is refused."""
    packed = {
        "input_ids": [[3, 4, 5, 6, 7], [8, 9, 10]], "labels": [[3, 4, 5, 6, 7], [8, 9, 10]],
        "seq_lengths": [[3, 2], [3]], "id": [[7, 8], [9]], "row": [1, 2],
    }  # fmt: skip
    data = datasets.Dataset.from_dict(packed)
    options = {**FREE, "dataset_kwargs": {"skip_prepare_dataset": True}, "examples": data}
    run = check(1, {"id_column": "id"}, **options)
    assert run.clipper.outcome.ids == ((7,), (8,), (9,))
    with pytest.raises(ValueError, match="Column 'row' .* each of its 2 texts, but is 1"):
        trl_runs.clipped("sft", trl_runs.model("llama"), 1, clip={"id_column": "row"}, **options)


def test_a_missing_column_is_named():
    clip = {"id_column": "number"}
    with pytest.raises(ValueError, match="no column 'number'"):
        trl_runs.trainer("sft", trl_runs.model("llama"), clip=clip, **PACKED)


def test_a_padding_free_collator_of_your_own():
    found, clip = trl_runs.Watch(), {"microbatch_size": 2}
    run = trl_runs.trainer("sft", trl_runs.model("llama"), clip=clip, watch=[found])
    run.data_collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    run.train()
    assert run.clipper.outcome.sizes.tolist() == [2, 2, 2]
    run.data_collator = DataCollatorForLanguageModeling(pad_token_id=0)
    for gradient, rows in zip(found.gradients, trl_runs.steps(14, 8), strict=True):
        twin = trl_runs.twin(run, rows, 2, reference.WEIGH["MinNorm()"])
        properties.assert_close(gradient, twin, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("packed", [None, False, True])
def test_evaluation_is_the_stock_trainers(packed):
    """Packed as the stock trainer packs it, in the middle of training."""
    logs = []
    for clip in (None, {"microbatch_size": 2, "id_column": "id", "domain_column": "place"}):
        run = trl_runs.trainer(
            "sft", trl_runs.model("llama"), clip=clip, eval_dataset=trl_runs.data("sft"),
            eval_strategy="steps", eval_steps=1, logging_steps=1, logging_strategy="steps",
            eval_packing=packed, **PACKED,
        )  # fmt: skip
        run.train()
        logs.append([entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry])
    assert len(logs[0]) > 1
    assert logs[1] == pytest.approx(logs[0], rel=1e-6)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 5


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:LossHistory holds back")
def test_resuming_gives_the_same_weights(tmp_path):
    """The rule and its record of packed texts go on where they were."""
    found = []
    for folder, calls in ((tmp_path / "whole", [False]), (tmp_path / "parts", [False, True])):
        for resume in calls:
            clip = {"rule": rules.LossHistory(total_steps=30), "id_column": "id"}
            net = trl_runs.model("llama")
            run = trl_runs.trainer(
                "sft", net, clip=clip, watch=[Stop()] if len(calls) > 1 and not resume else [],
                folder=str(folder), learning_rate=0.02, num_train_epochs=10, shuffle_dataset=True,
                save_strategy="steps", save_steps=5, **PACKED,
            )  # fmt: skip
            run.train(resume_from_checkpoint=resume)
        assert run.state.global_step > 5
        found.append([p.detach().clone() for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("whole", [True, False])
def test_prompts_in_the_loss(whole):
    """`completion_only_loss`: labels are packed with their texts."""
    run = check(1, completion_only_loss=not whole, **PACKED)
    labels = [label for row in run.train_dataset["labels"] for label in row]
    assert (-100 in labels) == (not whole)
