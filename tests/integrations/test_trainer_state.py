"""Trainers that are interrupted, resumed, subclassed wrongly, or fed batches without padding."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback
from transformers.data.data_collator import default_data_collator
from transformers.training_args import OptimizerNames

from microclip import rules
from microclip.integrations.trainer_checks import refuse_unsupported
from microclip.integrations.transformers import ClippedTrainer, ClippedTrainerMixin

import properties
from trainers import (
    InOrder,
    InOrderPlain,
    Ordered,
    Watch,
    bert,
    clipped,
    examples,
    llama,
    trainer,
    wanted,
    windows,
)  # fmt: skip

SIZES = [(4, 2, 2), (4, 2, None), (4, 2, 8), (2, 4, 6)]


class Failing(Ordered):
    """Raises when it computes its n-th loss."""

    at, error = -1, KeyboardInterrupt()

    def compute_loss(self, *args, **kwargs):
        self.at -= 1
        if self.at == 0:
            raise self.error
        return super().compute_loss(*args, **kwargs)


class StopAt(TrainerCallback):
    """Stops training in the middle of a step."""

    def __init__(self, what="should_training_stop"):
        self.what, self.armed = what, True

    def on_substep_end(self, args, state, control, **kwargs):
        if self.armed and state.global_step == 1:
            self.armed = False
            setattr(control, self.what, True)


def assert_steps(watch, model, data, size, steps, b):
    taken = windows(size, steps)
    assert len(watch.gradients) == len(taken)
    for found, parts in zip(watch.gradients, taken, strict=True):
        properties.assert_close(found, wanted(model, data, parts, b), 1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("size", "steps", "b"), SIZES)
@pytest.mark.parametrize("how", ["error", "stop"])
def test_an_interrupted_step_is_not_continued(tmp_path, size, steps, b, how):
    model, data, watch = bert(), examples("bert"), Watch()
    run = trainer(
        tmp_path, model, data, kind=Failing, b=b, watch=[watch],
        per_device_train_batch_size=size, gradient_accumulation_steps=steps,
    )  # fmt: skip
    if how == "error":
        per_step = {2: 4, None: 2, 8: 2, 6: 4}[b]
        run.at = per_step + (7 if b in (6, 8) else 2)  # some losses are computed for measuring
        with pytest.raises(KeyboardInterrupt):
            run.train()
    else:
        run.add_callback(StopAt())
        run.train()
    watch.gradients.clear()
    run.train()
    assert_steps(watch, model, data, size, steps, b)


def test_a_checkpoint_in_the_middle_of_a_step(tmp_path):
    """An epoch cut short is saved; what was folded enters the next step, as without clipping."""
    run = trainer(
        tmp_path, bert(), examples("bert"), b=2, num_train_epochs=2, save_strategy="epoch"
    )
    run.add_callback(StopAt("should_epoch_stop"))
    run.train()
    state = torch.load(tmp_path / "checkpoint-1" / "microclip.pt")
    assert state["step"] == 1
    assert run.clipper.step == 4


class Counting(rules.MinNorm):
    """Counts the steps it has seen, and saves the count in checkpoints."""

    def __init__(self):
        object.__setattr__(self, "seen", 0)

    def observe(self, norms, sizes):
        object.__setattr__(self, "seen", self.seen + 1)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        object.__setattr__(self, "seen", state["seen"])


def test_resuming_with_the_same_object(tmp_path):
    rule = Counting()
    run = trainer(tmp_path, bert(), examples("bert"), b=2, save_strategy="steps", save_steps=1,
                  clip={"rule": rule})  # fmt: skip
    run.train()
    assert (run.clipper.step, rule.seen) == (3, 3)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (run.clipper.step, rule.seen) == (3, 3)


def test_resuming_from_a_trainer_that_did_not_clip(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, bert(), examples("bert"), kind=InOrderPlain, **options).train()
    rule = Counting()
    run = trainer(tmp_path, bert(), examples("bert"), b=2, clip={"rule": rule})
    run.train()
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (run.clipper.step, rule.seen) == (1, 1)


def test_another_model_starts_afresh(tmp_path):
    rule = Counting()
    run = trainer(tmp_path, None, examples("bert"), b=2, clip={"rule": rule, "model_init": bert})
    run.train()
    first = run.model
    run.train()
    assert run.model is not first
    assert (run.clipper.step, rule.seen) == (3, 3)


@pytest.mark.parametrize("b", [2, 12])
def test_smaller_batches_after_running_out_of_memory(tmp_path, b):
    """Memory runs out in the middle of a step; its first half is dropped."""
    data, watch = examples("bert"), Watch()
    run = trainer(
        tmp_path, bert(), data, kind=Failing, b=b, watch=[watch], auto_find_batch_size=True,
        num_train_epochs=1,
    )  # fmt: skip
    run.error = RuntimeError("CUDA out of memory.")
    run.at = 9 if b == 12 else 6
    run.train()
    assert run._train_batch_size == 3
    taken = windows(3, 2)
    for found, parts in zip(watch.gradients[-len(taken) :], taken, strict=True):
        properties.assert_close(found, wanted(run.model, data, parts, b), 1e-5)


# Batches without padding


def texts():
    data = examples("llama")
    for row, example in enumerate(data):
        example["input_ids"] = example["labels"] = example["input_ids"][: 3 + row % 4]
    return data


def packed_loss(model, data, rows):
    """Return the mean over all predicted tokens, text by text."""
    scores = [model(input_ids=data[row]["input_ids"][None]).logits[0, :-1] for row in rows]
    return F.cross_entropy(torch.cat(scores), torch.cat([data[row]["labels"][1:] for row in rows]))


@pytest.mark.sample(4)
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(("steps", "b"), [(1, None), (2, None), (2, 4), (1, 4)])
def test_batches_without_padding_count_by_their_examples(tmp_path, steps, b, flash):
    data, watch, model = texts(), Watch(), llama()
    clip = {"data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=flash)}
    run = trainer(tmp_path, model, data, b=b, watch=[watch], clip=clip,
                  gradient_accumulation_steps=steps)  # fmt: skip
    run.train()
    for found, parts in zip(watch.gradients, windows(4, steps), strict=True):
        sizes = [len(part) for part in parts]
        twin = clipped(model, lambda model, rows: packed_loss(model, data, rows), parts, sizes)
        properties.assert_close(found, twin, 1e-5)
    assert run.clipper.outcome.sizes.tolist()[-1] == 2


@pytest.mark.parametrize("b", [1, 2, 8])
def test_batches_without_padding_cannot_be_cut(tmp_path, b):
    run = trainer(
        tmp_path, llama(), texts(), b=b, clip={"data_collator": DataCollatorWithFlattening()}
    )
    with pytest.raises(NotImplementedError, match=f"out of 4 examples .* micro-batches of {b}"):
        run.train()


def test_batches_without_padding_have_no_domains(tmp_path):
    data = [{**example, "place": "sea"} for example in texts()]
    clip = {"data_collator": DataCollatorWithFlattening(), "domain_column": "place"}
    run = trainer(tmp_path, llama(), data, clip=clip)
    with pytest.raises(NotImplementedError, match="cannot be told apart by domain"):
        run.train()


def repeat(features):
    return default_data_collator([*features, *features])


def concatenate(features):
    """Concatenates texts without marking where they end."""
    tokens = torch.cat([torch.as_tensor(feature["input_ids"]) for feature in features])[None]
    return {"input_ids": tokens, "labels": tokens}


def test_rows_that_are_several_texts_cannot_be_cut(tmp_path):
    model = llama()
    run = trainer(tmp_path, model, examples("llama"), b=2, clip={"data_collator": concatenate})
    with pytest.raises(NotImplementedError, match="whose rows are not examples"):
        run.train()


def test_rows_that_are_more_than_examples_cannot_be_cut(tmp_path):
    run = trainer(tmp_path, bert(), examples("bert"), b=2, clip={"data_collator": repeat})
    with pytest.raises(NotImplementedError, match="8 rows out of 4 examples"):
        run.train()


def test_a_collator_may_drop_examples(tmp_path):
    clip = {"data_collator": lambda features: default_data_collator(features[:-1])}
    run = trainer(tmp_path, bert(), examples("bert"), b=2, clip=clip)
    run.train()
    assert run.clipper.outcome.sizes.tolist() == [2, 1, 1]


# Subclasses


def test_a_mixin_in_the_wrong_place(tmp_path):
    class Mine(Trainer):
        pass

    match = r"would not clip anything.*class Wrong\(ClippedTrainerMixin, (Mine|Trainer)\)"
    with pytest.raises(TypeError, match=match):
        type("Wrong", (Mine, ClippedTrainerMixin), {})
    with pytest.raises(TypeError, match=match):
        type("Wrong", (InOrder, Trainer, ClippedTrainerMixin), {})

    class Half(ClippedTrainerMixin):
        pass

    with pytest.raises(TypeError, match="would not clip anything"):
        type("Wrong", (Mine, Half), {})
    type("Right", (Half, Mine), {})
    type("Right", (InOrder, ClippedTrainer), {})
    type("Right", (InOrder, ClippedTrainerMixin, Mine), {})


class Stepping(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


def test_a_training_step_that_would_be_lost():
    with pytest.raises(TypeError, match=r"Stepping.training_step would never be called"):
        type("Lost", (ClippedTrainerMixin, Stepping), {})

    class Further(Stepping):
        pass

    with pytest.raises(TypeError, match=r"Stepping.training_step would never be called"):
        type("Lost", (InOrder, ClippedTrainerMixin, Further), {})


def test_a_training_step_around_ours_is_called(tmp_path):
    calls = []

    class Around(Ordered):
        def training_step(self, *args, **kwargs):
            calls.append(1)
            return super().training_step(*args, **kwargs)

    model, data, watch = bert(), examples("bert"), Watch()
    trainer(tmp_path, model, data, kind=Around, b=2, watch=[watch]).train()
    assert len(calls) == 6
    assert_steps(watch, model, data, 4, 2, 2)


def unclipped(self, model, inputs, num_items_in_batch=None):
    loss = self.compute_loss(model, self._prepare_inputs(inputs))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_training_step_that_does_not_clip(tmp_path, where):
    kind = type("Unclipped", (Ordered,), {"training_step": unclipped} if where == "class" else {})
    run = trainer(tmp_path, bert(), examples("bert"), kind=kind, b=2, learning_rate=0.1)
    if where == "instance":
        run.training_step = lambda *args: unclipped(run, *args)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    with pytest.raises(RuntimeError, match="training_step does not call the one of Clipped"):
        run.train()
    assert all(map(torch.equal, before, run.model.parameters()))


def test_context_parallelism_is_refused(tmp_path):
    run = trainer(tmp_path, bert(), examples("bert"), b=2)
    run.accelerator.state.parallelism_config = SimpleNamespace(cp_enabled=True)
    try:
        with pytest.raises(NotImplementedError, match="every rank has a part of each text"):
            refuse_unsupported(run)
    finally:
        run.accelerator.state.parallelism_config = None


@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw_layerwise"])
def test_optimizers_that_step_during_backward_are_refused(tmp_path, name):
    run = trainer(tmp_path, bert(), examples("bert"), b=2)
    run.args.optim = OptimizerNames(name)
    with pytest.raises(NotImplementedError, match=f"optim='{name}' updates weights during"):
        refuse_unsupported(run)


@pytest.mark.parametrize("clip", [{"engine": "two_pass"}, {"rule": rules.Median()}])
def test_a_refused_wide_microbatch_leaves_nothing_behind(tmp_path, clip):
    run = trainer(tmp_path, bert(), examples("bert"), b=8, clip=clip)
    with pytest.raises(RuntimeError, match="with a rule that streams"):
        run.train()
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("b", [2, 8])
def test_activation_checkpointing(tmp_path, reentrant, b):
    model, data, watch = llama(), examples("llama"), Watch()
    run = trainer(
        tmp_path, model, data, b=b, watch=[watch], gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )  # fmt: skip
    run.train()
    assert_steps(watch, model, data, 4, 2, b)
