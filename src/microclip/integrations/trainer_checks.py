"""Checks on a Trainer: does its setup clip at all, is its loss transformers' own, do losses agree?

Setups that would not clip, or would clip the wrong thing, are refused before they train.

Per-example losses are known for transformers' own losses only, and a loss can be replaced in many
places. A function counts as transformers' own if its source file is theirs. `DryRun` computes a
loss and its gradient in training mode without leaving a trace, and always from the same random
numbers, so that two ways of computing a loss see the same dropout. What is in `.grad`, buffers,
random generators and training modes are restored.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.loss.loss_utils import LOSS_MAPPING

from microclip.batches import tensors_of
from microclip.engines.gradients import backward, trainable
from microclip.engines.snapshot import undisturbed
from microclip.integrations.columns import PACKING_KEYS
from microclip.rules import ExampleRule
from microclip.wrappers import is_sharded

PACKAGES = tuple(
    f"{Path(p.__file__ or '').parent}{os.sep}" for p in (transformers, accelerate, torch)
)
PEFT = "/site-packages/peft/"  # adapters pass labels and losses through unchanged
TRL = "/site-packages/trl/"  # its trainers, and the head it adds to a model

# Tolerances, by the bits of the computation
LOSS_TOLERANCE = {32: 1e-5, 16: 1e-2}
GRADIENT_TOLERANCE = {32: 1e-4, 16: 3e-2}  # relative, per parameter
GRADIENT_NOISE = {32: 3e-7, 16: 1e-3}  # of the whole norm, for parameters whose terms cancel out

Gradient = list[Tensor | None]


def why_not_stock_loss(
    trainer: Any, model: nn.Module, inner: nn.Module, inputs: dict[str, Any]
) -> str | None:
    """Return why the loss may differ from the one transformers has for this model, or None.

    Called before every step, so it looks at attributes only and never at the values of a tensor.
    """
    return why_not_stock_parts(trainer, model, inner) or _why_not_stock_inputs(inner, inputs)


def why_not_stock_parts(trainer: Any, model: nn.Module, inner: nn.Module) -> str | None:
    """Return why Trainer or model may have another loss than their packages', or None."""
    if not has_stock_compute_loss(trainer):
        return "compute_loss is overridden"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is set"
    if trainer.label_smoother is not None:
        return "label smoothing is on"
    if is_sharded(inner):
        return "the model is sharded"
    for each in {id(model): model, id(inner): inner}.values():
        found = _why_not_stock_module(each, outer=each is not inner)
        if found is not None:
            return found
    return None


def has_stock_compute_loss(trainer: Any) -> bool:
    """Whether a Trainer's `compute_loss` is transformers' own."""
    return "compute_loss" not in vars(trainer) and _is_stock(type(trainer).compute_loss)


def loss_fingerprint(inner: nn.Module, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a model's loss depends on besides its weights, to notice when it changes."""
    labels = inputs["labels"]
    return (*loss_settings(inner), frozenset(inputs), labels.dim(), labels.dtype)


def loss_settings(inner: nn.Module) -> tuple[Any, ...]:
    """Return what of this depends on the model."""
    forward = getattr(inner.forward, "__func__", inner.forward)
    loss = (vars(inner).get("_loss_function"), getattr(inner, "loss_type", None))
    return id(inner), type(inner), forward, loss, dict(_settings(getattr(inner, "config", None)))


@dataclass(frozen=True)
class LossAndGradient:
    """The loss of a batch and its gradient."""

    loss: Tensor
    gradient: Gradient  # empty if not requested

    @property
    def is_finite(self) -> bool:
        """Whether the loss can be compared at all."""
        return bool(self.loss.isfinite())

    def agrees_with(self, other: LossAndGradient, bits: int) -> bool:
        """Whether loss and gradient are equal up to rounding."""
        if not losses_agree(self.loss, other.loss):
            return False
        return gradients_agree(self.gradient, other.gradient, bits)


class DryRun:
    """Runs forward and backward passes of a Trainer's model without side effects."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model
        self.parameters = list(trainable(model).values())
        halves = any(parameter.element_size() < 4 for parameter in self.parameters)
        mixed = getattr(trainer.accelerator, "mixed_precision", "no") not in (None, "no")
        self.bits = 16 if halves or mixed else 32
        self.extra_losses: list[str] = []  # other losses that the model's output reports
        self._fills_grad = False  # whether gradients are taken from `.grad`

    def trainer_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Return the loss that the Trainer trains on."""
        loss = self.trainer.compute_loss(self.model, dict(inputs), num_items_in_batch=None)
        mean: Tensor = loss.mean()
        return mean

    def stock_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Return the same from transformers' own `compute_loss`, and fill in `extra_losses`."""
        inputs = dict(inputs)
        loss: Tensor
        loss, outputs = self.trainer.compute_loss(self.model, inputs, True, None)
        if isinstance(outputs, dict):
            others = [name for name in outputs if name.endswith("_loss")]
            self.extra_losses = [name for name in others if outputs[name] is not None]
        return loss

    def run(
        self,
        loss_fn: Callable[[], Tensor],
        with_gradient: bool = True,
        expected: Tensor | None = None,
    ) -> LossAndGradient:
        """Return a loss and its gradient, computed from the current random state.

        If the loss is not the expected one, the gradient is not computed: they differ already.
        """
        try:
            return self._run(loss_fn, with_gradient, expected)
        except RuntimeError as error:
            if self._fills_grad or ".grad()" not in str(error):
                raise
            self._fills_grad = True  # checkpoints with use_reentrant=True know backward() only
        return self._run(loss_fn, with_gradient, expected)

    def _run(
        self, loss_fn: Callable[[], Tensor], with_gradient: bool, expected: Tensor | None
    ) -> LossAndGradient:
        gradient: Gradient = []
        with undisturbed(self.model, trainable(self.model)), torch.set_grad_enabled(with_gradient):
            with self.trainer.compute_loss_context_manager(), warnings.catch_warnings():
                if not with_gradient:  # reentrant checkpoints warn of it
                    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
                loss = loss_fn()
            if with_gradient and (expected is None or losses_agree(loss.detach(), expected)):
                if self._fills_grad:
                    backward(loss, None)
                    gradient = [parameter.grad for parameter in self.parameters]
                else:
                    gradient = list(torch.autograd.grad(loss, self.parameters, allow_unused=True))
        return LossAndGradient(loss.detach(), gradient)


def losses_agree(one: Tensor, other: Tensor) -> bool:
    """Whether two losses are equal up to rounding."""
    bits = 16 if min(one.element_size(), other.element_size()) < 4 else 32
    return bool((one.float() - other.float()).abs() <= LOSS_TOLERANCE[bits] * other.float().abs())


def gradients_agree(one: Gradient, other: Gradient, bits: int, slack: float = 1.0) -> bool:
    """Whether two gradients are equal up to rounding, parameter by parameter."""
    pairs = [
        (_or_zeros(a, like=b), _or_zeros(b, like=a))
        for a, b in zip(one, other, strict=True)
        if a is not None or b is not None
    ]
    if not pairs:
        return True
    differences = torch.stack([_norm(a - b) for a, b in pairs])
    norms = torch.stack([torch.maximum(_norm(a), _norm(b)) for a, b in pairs])
    noise = slack * GRADIENT_NOISE[bits] * _norm(norms)
    return bool((differences <= GRADIENT_TOLERANCE[bits] * norms + noise).all())


def _or_zeros(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    assert like is not None
    return torch.zeros_like(like)


def _norm(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, in at least 32 bits."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor.to(wide))
    return norm


def _why_not_stock_module(module: nn.Module, outer: bool) -> str | None:
    name = type(module).__name__
    compiled = hasattr(module, "_orig_mod")
    if outer and not compiled and not isinstance(module, DistributedDataParallel):
        return f"the model is wrapped in {name}"
    called = outer or type(module).__call__ is nn.Module.__call__
    if not called or not _is_stock(module.forward):
        return f"{name}.forward is not transformers' own"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*nn_module._global_forward_hooks.values()]
    hooks += [*nn_module._global_forward_pre_hooks.values()]
    # the Clipper's own only counts the forward passes of DistributedDataParallel
    if not all(type(hook).__module__.startswith("microclip.") for hook in hooks):
        return f"{name} has forward hooks"
    loss = vars(module).get("_loss_function")
    if loss is None:
        loss = LOSS_MAPPING.get(getattr(module, "loss_type", None) or "ForCausalLM")
    if loss is not None and not _is_stock(loss):
        return f"{name}.loss_function is not transformers' own"
    defined = inspect.getattr_static(type(module), "loss_function", None)
    if isinstance(defined, property) and defined.fget is not None:
        defined = defined.fget
    if defined is not None and not _is_stock(defined):
        return f"{name}.loss_function is not transformers' own"
    return None


def _why_not_stock_inputs(inner: nn.Module, inputs: dict[str, Any]) -> str | None:
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return "the labels are not integers"
    others = [name for name in inputs if name != "labels"]
    if any("label" in name or "loss" in name for name in others):
        return "the inputs have other labels besides 'labels'"
    known = inspect.signature(inner.forward).parameters
    unknown = [name for name in others if name not in known]
    if unknown and not _is_peft(inner):
        return f"{unknown[0]!r} is not an argument of the model's forward and may reach the loss"
    return None


def _is_stock(function: Any) -> bool:
    """Whether a function and all it wraps come from transformers, accelerate or torch.

    The code object decides: `functools.wraps` copies the name and module of another function.
    """
    return all(_is_in_packages(_source_file(layer)) for layer in _unwrapped(function))


def _unwrapped(function: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _source_file(function: Any) -> str:
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else code.co_filename


def _is_in_packages(path: str) -> bool:
    return PEFT in path or TRL in path or path.startswith(PACKAGES)


def _is_peft(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a configuration and of the configurations nested in it."""
    for name, value in vars(config).items() if config is not None else ():
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            # lists and dicts may be changed in place, so compare what they print as
            yield f"{prefix}{name}", repr(value) if isinstance(value, list | dict) else value


def check_base_classes(cls: type, mixin: type, packages: tuple[str, ...]) -> None:
    """Refuse a Trainer before the mixin, or one after it whose training_step would be lost.

    That of a Trainer from these packages is known, and replaced.
    """
    order = cls.__mro__
    place = order.index(mixin)
    for base in order[:place]:
        if issubclass(base, Trainer) and not issubclass(base, mixin):
            raise TypeError(
                f"{cls.__name__} would not clip anything, because {base.__name__} comes before "
                f"{mixin.__name__}. Write class {cls.__name__}({mixin.__name__}, {base.__name__})."
            )
    for base in order[place + 1 :]:
        package = base.__module__.partition(".")[0]
        if package == "trl" and package not in packages:
            raise TypeError(
                f"{base.__name__} has a training step of its own. Write class {cls.__name__}"
                f"(ClippedTrlMixin, {base.__name__}), with the mixin of microclip.integrations.trl."
            )
        theirs = package in packages
        if issubclass(base, Trainer) and not theirs and "training_step" in vars(base):
            raise TypeError(
                f"{base.__name__}.training_step would never be called, because {mixin.__name__} "
                "replaces it. Move its code to compute_loss or a callback, or to a class before "
                f"{mixin.__name__} whose training_step calls super().training_step(...)."
            )


def refuse_unsupported(trainer: Any) -> None:
    """Refuse setups that reduce or use gradients before they can be clipped."""
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise NotImplementedError(
            "DeepSpeed reduces gradients before they can be clipped. Use DDP or FSDP2."
        )
    if trainer.args.n_gpu > 1:
        raise NotImplementedError(
            "nn.DataParallel adds up the gradients of its GPUs before they can be clipped. Start "
            "with torchrun, which runs one process per GPU."
        )
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise NotImplementedError(
            f"optim={optimizer!r} updates weights during the backward pass, before gradients can "
            "be clipped. Use an optimizer that updates them in step()."
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for kind in ("cp", "sp"):
        if getattr(parallelism, f"{kind}_enabled", False):
            raise NotImplementedError(
                "With context or sequence parallelism every rank has a part of each text, so no "
                "rank has whole examples to make micro-batches of. Use DDP or FSDP2."
            )


def not_examples_message(examples: int, inputs: dict[str, Any], size: int | None) -> str:
    """Explain what is wrong with a batch whose rows are not examples."""
    rows = max(len(leaf) for _, leaf in tensors_of(inputs))
    made = f"The data collator made a batch of {rows} row{'s' * (rows > 1)} out of {examples} "
    made += f"example{'s' * (examples > 1)} of the data set"
    if rows <= examples or any(name in inputs for name in PACKING_KEYS):
        return (
            f"{made}, whose rows are not examples (perhaps it packs them without padding), so it "
            f"cannot be cut into micro-batches of {size}. Use a collator that pads, or "
            "microbatch_size=None, which makes each batch one micro-batch."
        )
    return (
        f"{made}, so microclip cannot know which rows belong together, and cannot cut it into "
        f"micro-batches of {size}. If the data set yields whole batches, let it yield single "
        "examples and set per_device_train_batch_size, or return "
        "DataLoader(data, batch_size=None) from get_train_dataloader: each row then counts as an "
        "example. If an example has several rows, such as a pair of answers, stack them along a "
        "second dimension and flatten it in the model. Or use microbatch_size=None, which makes "
        "each batch one micro-batch."
    )


def check_weighted_batch(rule: ExampleRule, ids: Any, packed: int | None) -> None:
    """Refuse a batch whose examples a rule cannot recognize, or cannot weight."""
    name = type(rule).__name__
    if rule.needs_ids and ids is None:
        raise ValueError(
            f"{name} remembers every example, but the examples have no ids. Add a column with "
            'their numbers, dataset = dataset.add_column("id", list(range(len(dataset)))), or '
            'data = [{**example, "id": i} for i, example in enumerate(data)] for a list, and pass '
            'id_column="id".'
        )
    if packed is not None:
        raise NotImplementedError(
            f"{name} weights examples, but the data collator made a batch of {packed} of them "
            "whose rows are not examples (perhaps it packs them without padding), so they cannot "
            "be told apart. Use a collator that pads."
        )


def no_example_losses_message(rule: ExampleRule, reason: str) -> str:
    """Explain why examples cannot be weighted one by one."""
    return (
        f"{type(rule).__name__} weights examples, which takes one loss per example, but the "
        f"Trainer's loss has no such form: {reason or 'it is not finite in this batch'}. Pass "
        "microbatch_size=1 (slow) or more, and micro-batches are weighted instead, by the mean "
        "weight of their examples."
    )


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a sharded model where the clipper does not run the backward pass itself."""
    if is_sharded(model):
        raise NotImplementedError(
            "The gradients of a sharded model are reduced over ranks during the backward pass, so "
            "a micro-batch must be part of one batch. Set microbatch_size to at most "
            "per_device_train_batch_size, and use a collator that pads."
        )


class RequireClipped(TrainerCallback):
    """Raises if the optimizer is about to use a gradient that was not clipped."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Check that the clipper has finished this step."""
        if not self.trainer._clipped:
            raise RuntimeError(
                "The optimizer was about to step with a gradient that was not clipped, because "
                f"{type(self.trainer).__name__}.training_step does not call the one of "
                "ClippedTrainerMixin. Call super().training_step(model, inputs, "
                "num_items_in_batch) in it."
            )
        self.trainer._clipped = False
