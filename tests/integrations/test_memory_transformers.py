"""Rules that weight examples, in transformers' Trainer: one pass, equal to a slow twin."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from microclip.rules import LossHistory, LossWeight, MinNorm, NormHistory, Unit

import properties
import reference
import trainers
from example_weights import ByKey, weight_of
from trainers import InOrderPlain, Ordered, Watch, trainer, windows


def numbered(kind):
    return [{**example, "number": row} for row, example in enumerate(trainers.examples(kind))]


def run(folder, kind, rule, b=None, size=8, steps=1, data=None, more=None, **arguments):
    """Train with a learning rate of 0 and return the Trainer and its gradients."""
    watch = Watch()
    made = trainer(
        folder, trainers.MODELS[kind](), numbered(kind) if data is None else data, b=b,
        watch=[watch], clip={"rule": rule, "id_column": "number", **(more or {})},
        per_device_train_batch_size=size, gradient_accumulation_steps=steps, **arguments,
    )  # fmt: skip
    made.train()
    return made, watch.gradients


def own_loss(model, example):
    """Return the loss of an example alone."""
    batch = {k: v[None] for k, v in example.items() if isinstance(v, torch.Tensor)}
    return model(**batch).loss.item()


def example_losses(model, data, rows):
    """Return the loss of each example such that their mean is the model's loss of the batch."""
    losses, counts = [], []
    for row in rows:
        batch = {k: v[None] for k, v in data[row].items() if isinstance(v, torch.Tensor)}
        labels = batch["labels"]
        if labels.dim() == 2 and isinstance(model, trainers.LlamaForCausalLM):
            labels = labels[:, 1:]
        ctc = labels.dim() == 1 or hasattr(model.config, "ctc_loss_reduction")
        counts.append(1 if ctc else int((labels != -100).sum()))
        losses.append(model(**batch).loss)
    scale = len(rows) / sum(counts)
    return [loss * count * scale for loss, count in zip(losses, counts, strict=True)]


def twin(model, data, parts):
    """Return sum w_i g_i / max(sum w_i, B / 1000), example by example."""
    model.train()
    rows = [row for part in parts for row in part]
    losses = [loss for part in parts for loss in example_losses(model, data, part)]
    gradients = reference.microbatch_gradients(
        lambda i: losses[i], list(model.parameters()), range(len(rows))
    )
    weights = [weight_of(row) for row in rows]
    divisor = max(sum(weights), len(rows) / 1000)
    return reference.weighted_sum(gradients, [w / divisor for w in weights])


@pytest.mark.parametrize("kind", trainers.MODELS)
@pytest.mark.parametrize(("size", "steps", "b"), [(8, 1, None), (4, 2, 2), (4, 2, 8)])
def test_a_step_is_the_weighted_mean_of_its_examples(tmp_path, kind, size, steps, b):
    """Whatever the micro-batch size, even if it is larger than a batch."""
    rule = ByKey()
    made, found = run(tmp_path, kind, rule, b, size, steps)
    data = numbered(kind)
    taken = windows(size, steps)
    assert len(found) == len(taken) == len(rule.seen)
    for gradients, parts, seen in zip(found, taken, rule.seen, strict=True):
        wanted = twin(made.model, data, parts)
        properties.assert_close(gradients, wanted, 1e-5)
        assert seen.keys.tolist() == [row for part in parts for row in part]
        own = [own_loss(made.model, data[row]) for part in parts for row in part]
        assert seen.losses.tolist() == pytest.approx(own, rel=1e-5)  # whatever the length
    assert made.clipper.outcome.sizes.tolist() == [len(part) for part in taken[-1]]


@pytest.mark.parametrize(("size", "steps", "b"), [(8, 1, 2), (4, 2, None)])
def test_micro_batches_of_weighted_examples_are_clipped(tmp_path, size, steps, b):
    made, found = run(tmp_path, "bert", ByKey(clip=MinNorm()), b, size, steps)
    data, model = numbered("bert"), made.model.train()
    for gradients, parts in zip(found, windows(size, steps), strict=True):
        step = b or size
        pieces = [part[i : i + step] for part in parts for i in range(0, len(part), step)]
        wanted = clipped(model, data, pieces, weighted_mean)
        properties.assert_close(gradients, wanted, 1e-5)


def weighted_mean(weights, losses):
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)


def clipped(model, data, pieces, mean, weigh=reference.WEIGH["MinNorm()"]):
    """Return the gradient of micro-batches that count by the weights of their examples."""
    weights = [[weight_of(row) for row in piece] for piece in pieces]
    losses = [mean(w, example_losses(model, data, p)) for w, p in zip(weights, pieces, strict=True)]
    gradients = reference.microbatch_gradients(
        lambda j: losses[j], list(model.parameters()), range(len(pieces))
    )
    return reference.clipped_gradient(gradients, [sum(w) for w in weights], weigh)[0]


class OwnLoss(Ordered):
    """A loss that has no form per example."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize(("size", "steps", "b"), [(8, 1, 2), (4, 2, 1), (2, 4, 4)])
def test_a_mean_loss_weights_micro_batches(tmp_path, size, steps, b):
    """Also those that span several batches."""
    watch, data = Watch(), numbered("bert")
    made = trainer(
        tmp_path, trainers.bert(), data, kind=OwnLoss, b=b, watch=[watch],
        clip={"rule": ByKey(), "id_column": "number"},
        per_device_train_batch_size=size, gradient_accumulation_steps=steps,
    )  # fmt: skip
    made.train()
    for gradients, parts in zip(watch.gradients, windows(size, steps), strict=True):
        if b > size:
            parts = [[row for part in parts for row in part]]
        pieces = [part[i : i + b] for part in parts for i in range(0, len(part), b)]
        wanted = clipped(
            made.model.train(), data, pieces,
            mean=lambda _, losses: sum(losses) / len(losses),
            weigh=lambda norms, _: [1] * len(norms),
        )  # fmt: skip
        properties.assert_close(gradients, wanted, 1e-5)


def test_a_mean_loss_without_a_micro_batch_size_is_refused(tmp_path):
    made = trainer(
        tmp_path, trainers.bert(), numbered("bert"), kind=OwnLoss,
        clip={"rule": LossHistory(), "id_column": "number"},
    )  # fmt: skip
    with pytest.raises(
        NotImplementedError, match=r"no such form: compute_loss is overridden\. Pass microbatch_si"
    ):
        made.train()


@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
def test_equals_the_stock_trainer_while_all_weights_are_one(tmp_path, kind):
    """Bit for bit: the loss per example adds nothing, not even rounding."""
    arguments = {"learning_rate": 0.01, "max_grad_norm": 1.0, "num_train_epochs": 2}
    arguments |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    data = [dict(example) for example in trainers.examples(kind)][:20]
    stock = trainer(tmp_path, trainers.MODELS[kind](), data, kind=InOrderPlain, **arguments)
    stock.train()
    made = trainer(
        tmp_path, trainers.MODELS[kind](),
        [{**example, "id": f"row {i}"} for i, example in enumerate(data)],
        clip={"rule": LossHistory(total_steps=1000), "id_column": "id"}, **arguments,
    )  # fmt: skip
    made.train()
    pairs = zip(stock.model.parameters(), made.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(made.clipper.policy.rule.table) == 20


def learnable(count=48, wrong=8):
    """Texts whose first token gives the label; a few have another one."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for row in range(count):
        tokens = torch.randint(1, 17, (6,), generator=generator)
        tokens[0] = 1 + row % 3
        label = (row + (row < wrong)) % 3
        found.append({"input_ids": tokens, "labels": torch.tensor(label), "number": row})
    return found


LONG = {"num_train_epochs": 24, "learning_rate": 3e-2, "per_device_train_batch_size": 8}
LONG |= {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}


def long_run(folder, **more):
    return trainer(
        folder, trainers.bert(), learnable(),
        clip={"rule": LossHistory(), "id_column": "number"}, **LONG, **more,
    )  # fmt: skip


def test_wrong_examples_are_held_back_and_counted_in_the_log(tmp_path):
    made = long_run(tmp_path, logging_strategy="steps", logging_steps=1)
    made.train()
    rule = made.clipper.policy.rule
    assert rule.phase == "holding", (rule.phase, rule.mixtures)
    held = rule.weigh(torch.arange(48), None) < 0.5
    assert held.nonzero().flatten().tolist() == list(range(8))
    logged = [e["microclip/held_back"] for e in made.state.log_history if "loss" in e]
    assert len(logged) == 72
    assert logged[0] == 0
    assert logged[-3:] == [8, 0, 0]
    assert rule.total_steps == 72


def test_resumed_training_is_bit_for_bit_the_same(tmp_path):
    """From a checkpoint in which examples are held back."""
    whole = long_run(tmp_path / "whole", save_strategy="steps", save_steps=40)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-40"
    state = torch.load(checkpoint / "microclip.pt", weights_only=True)
    assert state["rule"]["phase"] in ("trial", "holding")
    assert state["rule"]["table"]["columns"]["visits"].tolist() == [14] * 16 + [13] * 32
    again = long_run(tmp_path / "again")
    again.train(resume_from_checkpoint=str(checkpoint))
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    one, other = (t.clipper.policy.rule for t in (whole, again))
    assert one.fingerprint() == other.fingerprint()
    assert one.total_steps == other.total_steps == 72


def test_the_rule_is_told_how_long_every_training_takes(tmp_path):
    made, _ = run(tmp_path, "bert", ByKey())
    rule = made.clipper.policy.rule
    assert rule.total_steps == 3  # 22 examples, 8 in a step
    made.args.num_train_epochs = 4
    made.train()
    assert rule.total_steps == 3 + 12  # the clipper keeps counting
    own, _ = run(tmp_path, "bert", ByKey(total_steps=7))
    assert own.clipper.policy.rule.total_steps == 7


def test_the_fresh_rule_that_is_kept_is_small(tmp_path):
    """And what was learned of another model's losses is forgotten with it."""
    made = trainer(
        tmp_path, trainers.bert(), learnable(), **{**LONG, "num_train_epochs": 2},
        clip={"rule": LossHistory(total_steps=100), "id_column": "number"},
    )  # fmt: skip
    made.train()
    rule = made.clipper.policy.rule
    assert len(rule.table) == 48
    columns = made._fresh_rule["table"]["columns"].values()
    assert sum(column.untyped_storage().nbytes() for column in columns) == 0
    made.model = made.model_wrapped = trainers.bert()
    made.train()
    assert rule.table["visits"][:48].tolist() == [2] * 48
    assert made.clipper.step == 6


@pytest.mark.parametrize("rule", [LossHistory(), NormHistory()])
def test_missing_ids_are_an_error_that_shows_how_to_add_them(tmp_path, rule):
    made = trainer(tmp_path, trainers.bert(), trainers.examples("bert"), b=1, clip={"rule": rule})
    with pytest.raises(ValueError, match=r'dataset.add_column\("id", list\(range\(len\(dataset'):
        made.train()


def test_positions_as_ids_are_an_error(tmp_path):
    data = [{**example, "number": row % 8} for row, example in enumerate(trainers.examples("bert"))]
    with pytest.raises(ValueError, match="these are positions in the batch"):
        run(tmp_path, "bert", LossHistory(), data=data)


def test_packed_batches_are_refused(tmp_path):
    data = [
        {"input_ids": [1, 2, 3 + row % 3], "labels": [1, 2, 3 + row % 3], "number": row}
        for row in range(8)
    ]
    made = trainer(
        tmp_path, trainers.llama(), data, clip={"rule": LossHistory(), "id_column": "number"}
    )
    made.data_collator = DataCollatorWithFlattening()
    with pytest.raises(NotImplementedError, match="cannot be told apart. Use a collator that pads"):
        made.train()


def test_clipped_micro_batches_must_be_part_of_a_batch(tmp_path):
    with pytest.raises(NotImplementedError, match="microbatch_size 8 is larger than the 4 exampl"):
        run(tmp_path, "bert", LossHistory(clip=Unit()), b=8, size=4, steps=2)


def test_norm_history_takes_single_examples(tmp_path):
    made, _ = run(tmp_path, "bert", NormHistory(total_steps=100), b=1)
    plain, _ = run(tmp_path, "bert", ByKey(), b=1)
    assert made.clipper.outcome.norms.numel() == 6
    averages = made.clipper.policy.rule.table["average"]
    for part in windows(8, 1)[0]:
        for row in part:
            loss = example_losses(plain.model.train(), numbered("bert"), [row])
            gradient = reference.microbatch_gradients(
                lambda _, loss=loss: loss[0], list(plain.model.parameters()), [0]
            )[0]
            assert averages[row].item() == pytest.approx(reference.norm(gradient), rel=1e-4)
    with pytest.raises(ValueError, match="pass microbatch_size=1 instead of 2"):
        run(tmp_path, "bert", NormHistory(), b=2)


@pytest.mark.parametrize("clip", [None, Unit()])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_loss_weight_needs_no_ids(tmp_path, kind, clip):
    """It goes by the mean loss of an example, not by its length."""
    rule = LossWeight(low=0.1, high=0.2, clip=clip)
    made, _ = run(tmp_path, kind, rule, 2, more={"id_column": None})
    outcome, data = made.clipper.outcome, numbered(kind)[16:]
    assert outcome.held_back > 0
    losses = torch.tensor([own_loss(made.model, example) for example in data])
    held = outcome.example_weights < 0.5
    assert losses[held].min() > losses[~held].max()


def test_domains_do_not_change_the_gradient(tmp_path):
    """They are for the rule's record; examples are weighted one by one either way."""
    data = [{**e, "origin": "ab"[r % 2]} for r, e in enumerate(numbered("llama"))]
    domains = {"domain_column": "origin"}
    one, with_domains = run(tmp_path, "llama", ByKey(), data=data, more=domains)
    _, without = run(tmp_path, "llama", ByKey())
    for a, b in zip(with_domains, without, strict=True):
        properties.assert_close(a, b, 1e-5)
    assert len(set(one.clipper.policy.rule.seen[0].domains.tolist())) == 2
