"""The Trainer of transformers, the real one: its gradients are those of the slow twin."""

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from microclip.integrations.transformers import (
    ClippedSeq2SeqTrainer,
    ClippedTrainer,
    ClippedTrainerMixin,
)
from microclip.microbatches import cut

import properties
import reference

COUNT = 22  # examples: with 8 in a step, the last step has 6


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=17, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def examples(kind):
    """Labels of different lengths for the language models: norms must not follow token counts."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(COUNT):
        tokens = torch.randint(1, 17, (6,), generator=generator)
        labels = tokens.clone()
        labels[: i % 5] = -100
        found.append({"input_ids": tokens, "labels": labels if kind != "bert" else tokens[0] % 3})
    return found


MODELS = {"bert": bert, "llama": llama, "t5": t5}


class Watch(TrainerCallback):
    """Keeps the gradients that the optimizer is about to see."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(
            [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        )


class InOrder:
    """The examples in the order given."""

    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


class Ordered(InOrder, ClippedTrainer):
    pass


class OrderedSeq2Seq(InOrder, ClippedSeq2SeqTrainer):
    pass


def trainer(folder, model, data, *, kind=Ordered, b=None, watch=(), clip=None, **arguments):
    options = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.0,
        "num_train_epochs": 1, "max_grad_norm": 0.0, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", **arguments,
    }  # fmt: skip
    seq2seq = issubclass(kind, ClippedSeq2SeqTrainer)
    args = (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(str(folder), **options)
    more = {} if kind is InOrderPlain else {"microbatch_size": b, **(clip or {})}
    return kind(model, args, train_dataset=data, callbacks=list(watch), **more)


class InOrderPlain(InOrder, Trainer):
    pass


def windows(sub_step, steps):
    """The examples of each optimizer step, as lists of what the model sees at once."""
    parts = [list(range(i, min(i + sub_step, COUNT))) for i in range(0, COUNT, sub_step)]
    return [parts[i : i + steps] for i in range(0, len(parts), steps)]


def stacked(data, rows):
    return {key: torch.stack([data[i][key] for i in rows]) for key in data[0]}


def wanted(model, data, parts, b):
    """The twin's gradient of one optimizer step."""
    size = len(parts[0])
    if b is not None and b > size:
        rows = [i for part in parts for i in part]
        pieces = [rows[i : i + b] for i in range(0, len(rows), b)]
        batches, sizes = [stacked(data, piece) for piece in pieces], [len(p) for p in pieces]
    else:
        cuts = [piece for part in parts for piece in cut(stacked(data, part), b)]
        batches, sizes = [piece.batch for piece in cuts], [piece.size for piece in cuts]
    model.train()
    gradients = reference.microbatch_gradients(
        lambda batch: model(**batch).loss, list(model.parameters()), batches
    )
    return reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("sub_step", "steps", "b"),
    [(8, 1, 2), (8, 1, None), (4, 2, None), (4, 2, 2), (4, 2, 3), (4, 2, 8), (2, 4, 4), (2, 4, 6)],
)
def test_gradients_equal_the_twin(tmp_path, kind, sub_step, steps, b):
    model, data, watch = MODELS[kind](), examples(kind), Watch()
    run = trainer(
        tmp_path, model, data, kind=OrderedSeq2Seq if kind == "t5" else Ordered, b=b, watch=[watch],
        per_device_train_batch_size=sub_step, gradient_accumulation_steps=steps,
    )  # fmt: skip
    run.train()
    steps_taken = windows(sub_step, steps)
    assert len(watch.gradients) == len(steps_taken) == 3
    for found, parts in zip(watch.gradients, steps_taken, strict=True):
        properties.assert_close(found, wanted(model, data, parts, b), 1e-5)


def test_max_grad_norm_acts_on_the_clipped_gradient(tmp_path):
    """With callbacks alone, it would have met the last micro-batch."""
    model, data, watch = bert(), examples("bert"), Watch()
    run = trainer(tmp_path, model, data, b=2, watch=[watch], max_grad_norm=0.01)
    run.train()
    for found, parts in zip(watch.gradients, windows(4, 2), strict=True):
        twin = wanted(model, data, parts, 2)
        scale = 0.01 / (reference.norm(twin) + 1e-6)
        assert scale < 1
        properties.assert_close(found, [None if g is None else scale * g for g in twin], 1e-5)


def test_one_microbatch_is_plain_training(tmp_path):
    """b = B: the same weights as the Trainer's own, bit for bit."""
    weights = []
    for kind in (InOrderPlain, Ordered):
        model = bert()
        run = trainer(
            tmp_path, model, examples("bert"), kind=kind, learning_rate=0.01,
            per_device_train_batch_size=8, gradient_accumulation_steps=1, max_grad_norm=1.0,
        )  # fmt: skip
        run.train()
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def test_resuming_gives_the_same_weights(tmp_path):
    arguments = {"learning_rate": 0.01, "save_strategy": "steps", "save_steps": 2}
    model = bert()
    whole = trainer(tmp_path, model, examples("bert"), b=2, num_train_epochs=2, **arguments)
    whole.train()
    assert whole.clipper.step == 6
    again = bert()
    rest = trainer(tmp_path, again, examples("bert"), b=2, num_train_epochs=2, **arguments)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rest.clipper.step == 6
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_figures_are_logged(tmp_path):
    run = trainer(
        tmp_path, bert(), examples("bert"), b=2, logging_strategy="steps", logging_steps=1
    )
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(logged) == 3
    for entry in logged:
        assert 0 < entry["microclip/mean_weight"] <= 1
        assert entry["microclip/bound"] > 0
        assert entry["loss"] == pytest.approx(1.1, abs=0.3)


def test_domains_and_ids(tmp_path):
    data = [{**e, "place": i % 2, "number": 100 + i} for i, e in enumerate(examples("bert"))]
    run = trainer(
        tmp_path, bert(), data, b=2, clip={"domain_column": "place", "id_column": "number"}
    )
    run.train()
    outcome = run.clipper.outcome
    assert set(outcome.domains) == {0, 1}
    assert sorted(i for ids in outcome.ids for i in ids) == list(range(116, 122))


def test_domains_need_small_microbatches(tmp_path):
    data = [{**e, "place": i % 2} for i, e in enumerate(examples("bert"))]
    run = trainer(tmp_path, bert(), data, b=8, clip={"domain_column": "place"})
    with pytest.raises(ValueError, match="microbatch_size 8 is larger than the 4 examples"):
        run.train()


def test_bf16(tmp_path):
    model, data, watch = bert(), examples("bert"), Watch()
    trainer(tmp_path, model, data, b=2, watch=[watch], bf16=True).train()
    for found, parts in zip(watch.gradients, windows(4, 2), strict=True):
        properties.assert_close(found, wanted(model, data, parts, 2), 0.05)


def test_the_mixin_keeps_what_a_trainer_does(tmp_path):
    class Doubling(InOrder, Trainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    class Clipped(ClippedTrainerMixin, Doubling):
        pass

    model, data, watch = bert(), examples("bert"), Watch()
    trainer(tmp_path, model, data, kind=Clipped, b=2, watch=[watch]).train()
    twin = wanted(model, data, windows(4, 2)[0], 2)
    properties.assert_close(watch.gradients[0], [None if g is None else 2 * g for g in twin], 1e-5)
