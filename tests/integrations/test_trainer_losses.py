"""The Trainer's loss, replaced in every possible place: its gradient is what gets clipped."""

import functools
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertForSequenceClassification,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_pt_utils import LabelSmoother

from microclip.integrations.example_losses import ExampleLossFinder
from microclip.microbatches import cut

import properties
from hidden import Hidden
from trainers import (
    ONE_BATCH,
    Ordered,
    Watch,
    bert,
    clipped,
    ctc,
    examples,
    gpt2,
    llama,
    mixtral,
    own_loss,
    stacked,
    trainer,
    vit,
    windows,
)  # fmt: skip

SMALL = 1e-3  # size of an auxiliary term: about 0.1 % of the loss


def assert_clipped(run, watch, data, losses, b=2):
    """Check the gradient of each step against the reference, with that step's loss."""
    model = run.model
    steps = windows(8, 1)
    losses = losses if isinstance(losses, list) else [losses] * len(steps)
    assert len(watch.gradients) == len(steps)
    model.train()
    for found, (rows,), loss in zip(watch.gradients, steps, losses, strict=True):
        pieces = cut(stacked(data, rows), b)
        sizes = [piece.size for piece in pieces]
        twin = clipped(model, loss, [piece.batch for piece in pieces], sizes)
        properties.assert_close(found, twin, 1e-5)


def logits(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(**inputs).logits


def plain(model, batch):
    return F.cross_entropy(logits(model, batch), batch["labels"])


def penalty(scores):
    return SMALL * scores.square().mean()


def penalized(model, batch):
    return plain(model, batch) + penalty(logits(model, batch))


WEIGHTS = torch.tensor([1.0, 1.0, 9.0])


def weighted(model, batch):
    return F.cross_entropy(logits(model, batch), batch["labels"], weight=WEIGHTS)


def smoothed(model, batch):
    scores = logits(model, batch).log_softmax(-1)
    hard = F.nll_loss(scores, batch["labels"])
    return 0.8 * hard + 0.2 * -scores.mean(-1).mean()


def common_first():
    """Class 2 occurs in the last examples only."""
    data = examples("bert")
    for row, example in enumerate(data):
        example["labels"] = torch.tensor(row % 2 if row < 17 else 2 - row % 2)
    return data


# The ways to replace a loss


def on_the_instance(run):
    stock = run.compute_loss
    run.compute_loss = lambda model, inputs, **kwargs: (
        stock(model, inputs, **kwargs) + penalty(logits(model, inputs))
    )


def on_the_model(run):
    forward = run.model.forward

    def penalizing(**inputs):
        outputs = forward(**inputs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + penalty(outputs.logits)
        return outputs

    run.model.forward = penalizing


def disguised(run):
    forward = run.model.forward

    @functools.wraps(forward)
    def penalizing(**inputs):
        outputs = forward(**inputs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + penalty(outputs.logits)
        return outputs

    run.model.forward = penalizing


def by_a_hook(run):
    def add(module, inputs, outputs):
        if outputs.loss is not None:
            outputs.loss = outputs.loss + penalty(outputs.logits)
        return outputs

    run.model.register_forward_hook(add)


def by_compute_loss_func(run):
    run.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: (
        F.cross_entropy(outputs.logits, labels) + penalty(outputs.logits)
    )


def by_a_partial(run):
    def penalizing(forward, **inputs):
        outputs = forward(**inputs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + penalty(outputs.logits)
        return outputs

    run.model.forward = functools.partial(penalizing, run.model.forward)


REPLACED = [
    on_the_instance, on_the_model, disguised, by_a_hook, by_compute_loss_func, by_a_partial,
]  # fmt: skip


@pytest.mark.parametrize("replace", REPLACED)
def test_a_loss_that_is_replaced_is_trained_on(tmp_path, replace):
    data, watch = examples("bert"), Watch()
    options = {
        "remove_unused_columns": False,
        **ONE_BATCH,
    }  # wrappers hide forward's signature
    run = trainer(tmp_path, bert(), data, b=2, watch=[watch], **options)
    replace(run)
    run.train()
    assert run.clipper.outcome.engine == "stream"
    vars(run.model).pop("forward", None)
    run.model._forward_hooks.clear()
    assert_clipped(run, watch, data, penalized)


class Later(TrainerCallback):
    """Runs an action after the first step."""

    def __init__(self, action):
        self.action = action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.action()


@pytest.mark.parametrize("replace", REPLACED)
def test_a_loss_that_is_replaced_later_is_trained_on(tmp_path, replace):
    data, watch = examples("bert"), Watch()
    run = trainer(tmp_path, bert(), data, b=2, watch=[watch], **ONE_BATCH)
    run.add_callback(Later(lambda: replace(run)))
    run.train()
    vars(run.model).pop("forward", None)
    run.model._forward_hooks.clear()
    assert_clipped(run, watch, data, [plain, penalized, penalized])


def test_smoothing_that_begins_later(tmp_path):
    data, watch = examples("bert"), Watch()
    run = trainer(tmp_path, bert(), data, b=2, watch=[watch], **ONE_BATCH)
    run.add_callback(Later(lambda: setattr(run, "label_smoother", LabelSmoother(epsilon=0.2))))
    run.train()
    assert_clipped(run, watch, data, [plain, smoothed, smoothed])


def unshifted(model, batch):
    return F.cross_entropy(logits(model, batch).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("how", ["type", "function", "class"])
def test_another_loss_of_transformers_later(tmp_path, how):
    """The new loss is transformers' own, too, but not the one that was checked."""
    model, data, watch = llama(), examples("llama"), Watch()

    def switch():
        if how == "type":
            model.loss_type = "ForMaskedLM"
        elif how == "function":
            model.loss_function = LOSS_MAPPING["ForMaskedLM"]
        else:
            model.__class__ = Unshifted

    run = trainer(tmp_path, model, data, b=2, watch=[watch], **ONE_BATCH)
    run.add_callback(Later(switch))
    run.train()
    assert_clipped(run, watch, data, [tokens, unshifted, unshifted])


class Unshifted(LlamaForCausalLM):
    @property
    def loss_function(self):
        return LOSS_MAPPING["ForMaskedLM"]


def test_a_loss_replaced_for_all_models(tmp_path, monkeypatch):
    def doubled(logits, labels, vocab_size, **kwargs):
        return 2 * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def loss(model, batch):
        return doubled(logits(model, batch), batch["labels"], 17)

    data, watch = examples("llama"), Watch()
    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", doubled)
    run = trainer(tmp_path, llama(), data, b=2, watch=[watch], **ONE_BATCH)
    run.train()
    assert_clipped(run, watch, data, loss)


def test_compute_loss_replaced_for_all_trainers(tmp_path, monkeypatch):
    stock = Trainer.compute_loss

    @functools.wraps(stock)
    def penalizing(self, model, inputs, *args, **kwargs):
        return stock(self, model, inputs, *args, **kwargs) + penalty(logits(model, inputs))

    monkeypatch.setattr(Trainer, "compute_loss", penalizing)
    data, watch = examples("bert"), Watch()
    run = trainer(tmp_path, bert(), data, b=2, watch=[watch], **ONE_BATCH)
    run.train()
    assert_clipped(run, watch, data, penalized)


class InTraining(BertForSequenceClassification):
    """Adds a penalty in training only, so that evaluation does not show it."""

    def forward(self, input_ids=None, labels=None):
        outputs = super().forward(input_ids=input_ids, labels=labels)
        if self.training and outputs.loss is not None:
            outputs.loss = outputs.loss + penalty(outputs.logits)
        return outputs


class Weighted(BertForSequenceClassification):
    """Has class weights."""

    def forward(self, input_ids=None, labels=None):
        outputs = super().forward(input_ids=input_ids)
        if labels is not None:
            outputs.loss = F.cross_entropy(outputs.logits, labels, weight=WEIGHTS)
        return outputs


class LossProperty(LlamaForCausalLM):
    """Defines its loss function in a property."""

    @property
    def loss_function(self):
        return lambda logits, labels, **kwargs: (
            F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + penalty(logits)
        )


class Called(BertForSequenceClassification):
    """Adds a penalty outside of `forward`."""

    def __call__(self, *args, **kwargs):
        outputs = super().__call__(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + penalty(outputs.logits)
        return outputs


class Around(nn.Module):
    """A model that is not from transformers."""

    def __init__(self):
        super().__init__()
        self.inside = bert()

    def forward(self, input_ids=None, labels=None):
        scores = self.inside(input_ids=input_ids).logits
        loss = None
        if labels is not None:
            loss = F.cross_entropy(scores, labels) + penalty(scores)
        return SequenceClassifierOutput(loss=loss, logits=scores)


def tokens(model, batch):
    scores = logits(model, batch)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize(
    ("make", "data", "loss"),
    [
        (lambda: InTraining(bert().config), examples("bert"), penalized),
        (lambda: Weighted(bert().config), common_first(), weighted),
        (lambda: Called(bert().config), examples("bert"), penalized),
        (Around, examples("bert"), penalized),
        (
            lambda: LossProperty(llama().config),
            examples("llama"),
            lambda model, batch: tokens(model, batch) + penalty(logits(model, batch)),
        ),
    ],
    ids=["in-training", "class-weights", "called", "around", "property"],
)
def test_models_with_custom_losses(tmp_path, make, data, loss):
    torch.manual_seed(0)
    watch = Watch()
    run = trainer(tmp_path, make(), data, b=2, watch=[watch], **ONE_BATCH)
    run.train()
    assert run.clipper.outcome.engine == "stream"
    assert_clipped(run, watch, data, loss)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_class_weights_by_the_loss_function(tmp_path, size):
    """Weights that matter for the last examples only."""
    model, data, watch = llama(), examples("llama"), Watch()
    weight = torch.ones(17)
    for example in data[:16]:
        example["labels"][example["labels"] == 3] = 4
    weight[3] += size

    def loss_function(logits, labels, vocab_size, **kwargs):
        scores, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(scores, wanted, weight=weight)

    model.loss_function = loss_function
    run = trainer(tmp_path, model, data, b=2, watch=[watch], **ONE_BATCH)
    run.train()
    assert_clipped(
        run, watch, data, lambda m, batch: loss_function(logits(m, batch), batch["labels"], 17)
    )


@pytest.mark.parametrize("later", [False, True])
def test_a_router_loss(tmp_path, later):
    """It adds 0.1 % to the loss, from the first or from the second step on."""
    model, data, watch = mixtral(output_router_logits=not later), examples("llama"), Watch()
    run = trainer(tmp_path, model, data, b=2, watch=[watch], **ONE_BATCH)
    if later:
        run.add_callback(Later(lambda: setattr(model.config, "output_router_logits", True)))
    run.train()
    assert model.config.output_router_logits
    assert_clipped(run, watch, data, [tokens if later else own_loss, own_loss, own_loss])


def test_another_model_in_a_second_training(tmp_path):
    made = [bert, lambda: Weighted(bert().config)]
    data, watch = common_first(), Watch()
    clip = {"model_init": lambda: made.pop(0)() if made else bert()}
    run = trainer(tmp_path, None, data, b=2, watch=[watch], clip=clip, **ONE_BATCH)
    run.train()
    watch.gradients.clear()
    made[:] = [lambda: Weighted(bert().config)]
    run.train()
    assert type(run.model) is Weighted
    assert_clipped(run, watch, data, weighted)


def test_labels_that_were_shifted_before(tmp_path):
    """The loss is that of `shift_labels`, which differ from the labels in later examples."""
    data, watch = examples("llama"), Watch()
    for row, example in enumerate(data):
        example["shift_labels"] = F.pad(example["labels"][1:], (0, 1), value=-100)
        if row > 8:
            example["shift_labels"][2] = -100
    run = trainer(
        tmp_path, llama(), data, b=2, watch=[watch], remove_unused_columns=False, **ONE_BATCH
    )
    run.train()

    def loss(model, batch):
        scores = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(scores.flatten(0, 1), batch["shift_labels"].flatten())

    assert_clipped(run, watch, data, loss)


def test_gpt2_in_a_single_pass(tmp_path):
    """The Trainer cannot tell from its class that it shifts labels."""
    data, watch = examples("llama"), Watch()
    run = trainer(tmp_path, gpt2(), data, b=2, watch=[watch], clip={"engine": "fused"}, **ONE_BATCH)
    run.train()
    assert run.clipper.outcome.engine == "fused"
    assert_clipped(run, watch, data, tokens)


def test_fused_says_why_it_is_not_available(tmp_path):
    run = trainer(tmp_path, Around(), examples("bert"), b=2, clip={"engine": "fused"}, **ONE_BATCH)
    with pytest.raises(NotImplementedError, match=r"here: Around.forward is not transformers' own"):
        run.train()


@pytest.mark.parametrize("kind", ["bert", "vit", "ctc"])
def test_a_check_leaves_no_trace(tmp_path, kind):
    """With dropout, and masks drawn with numpy."""
    import numpy as np

    config = {"bert": bert, "vit": vit, "ctc": ctc}[kind]().config
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout"):
        setattr(config, name, 0.3)
    config.apply_spec_augment, config.mask_time_prob, config.mask_time_length = True, 0.5, 2
    model = type({"bert": bert, "vit": vit, "ctc": ctc}[kind]())(config)
    model.register_buffer("steps", torch.zeros(()))
    run = trainer(tmp_path, model, examples(kind), b=2, **ONE_BATCH)
    batch = stacked(examples(kind), range(8))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.eval()
    model.train()
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    found = ExampleLossFinder(run).find(model, batch)
    assert found is not None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert sorted(batch) == sorted(stacked(examples(kind), range(8)))


def test_a_check_that_fails_later_warns(tmp_path, monkeypatch):
    """No attribute shows it: a function deep inside transformers is replaced."""
    from transformers.loss import loss_utils

    data = examples("llama")
    run = trainer(tmp_path, llama(), data, b=2, **ONE_BATCH)
    stock = loss_utils.fixed_cross_entropy

    def begin():
        changed = lambda *args, **kwargs: 2 * stock(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(loss_utils, "fixed_cross_entropy", changed)

    run.add_callback(Later(begin))
    with pytest.warns(RuntimeWarning, match="some steps since the last check"):
        run.train()
    assert run.clipper.outcome.engine == "stream"


def test_checks_become_rare(tmp_path):
    """Forward passes of each batch: the 1st, 2nd, 4th and 8th are checked, the others are not."""
    hidden, at = Hidden(), []  # a plain list would be restored after each check

    class Counting(Ordered):
        def _prepare_inputs(self, inputs):
            at.append(len(hidden.calls))
            return super()._prepare_inputs(inputs)

    run = trainer(
        *(tmp_path, bert(), examples("bert")[:16]), kind=Counting, b=2, num_train_epochs=5,
        clip={"engine": "fused"},  # auto times engines, so its passes differ from run to run
        **ONE_BATCH,
    )  # fmt: skip
    run.model.bert.register_forward_hook(lambda *args: hidden.calls.append(1))
    run.train()
    each = [after - before for before, after in pairwise(at)]
    checked, others = [each[k] for k in (0, 1, 3, 7)], [each[k] for k in (2, 4, 5, 6)]
    assert len(set(others)) == 1
    assert min(checked) >= others[0] + 2  # the Trainer's loss, and ours
