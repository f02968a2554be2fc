"""Gradient checkpointing in the single pass: dropout, memory, real transformers, refusals."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from microclip import Clipper
from microclip.engines.single_pass import memory

import properties
import reference

MODES = ["none", "not reentrant", "reentrant"]


class Blocks(nn.Module):
    """Residual blocks with dropout."""

    def __init__(self, mode, width=8, depth=3, p=0.3):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width), nn.Dropout(p), nn.Tanh(), nn.Linear(width, width)
            )
            for _ in range(depth)
        )
        self.mode = mode

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.mode == "none":
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return x.square().mean((1, 2))


def single_pass(mode, **options):
    torch.manual_seed(0)
    model = Blocks(mode, **options).double()
    x = torch.randn(6, 4, 8, dtype=torch.float64) * torch.arange(1, 7).view(-1, 1, 1)
    torch.manual_seed(1)
    outcome = Clipper(model, 2, engine="fused", verify="never").backward(model, x)
    return outcome, [p.grad for p in model.parameters()], torch.rand(3)


@pytest.mark.parametrize("mode", MODES[1:])
def test_dropout_is_the_same_when_a_segment_runs_again(mode):
    """So gradients are those without checkpoints, and so are all later random numbers."""
    plain, wanted, after = single_pass("none")
    outcome, found, later = single_pass(mode)
    torch.testing.assert_close(outcome.norms, plain.norms, rtol=1e-12, atol=0)
    properties.assert_close(found, wanted, 1e-12)
    assert torch.equal(later, after)


@pytest.mark.parametrize("mode", MODES[1:])
def test_checks_with_dropout_pass(mode):
    model = Blocks(mode).double()
    clipper = Clipper(model, 1, engine="fused", verify="always")
    for _ in range(3):
        x = torch.randn(5, 4, 8, dtype=torch.float64)
        assert clipper.backward(model, x).engine == "fused"


def test_a_segment_that_does_something_else_the_second_time_is_refused():
    layer = nn.Linear(4, 4)
    model, calls = nn.ModuleList([layer]), []

    def loss_fn(x):
        def segment(h):
            calls.append(1)
            return layer(h).tanh().exp() if len(calls) % 2 else layer(h)

        return checkpoint(segment, x, use_reentrant=False).mean(1)

    with pytest.raises(NotImplementedError, match="saves other tensors when it runs again"):
        Clipper(model, 1, engine="fused").backward(loss_fn, torch.randn(3, 4))
    assert layer.weight.grad is None


def test_nothing_of_a_pass_is_left_on_the_batch():
    model = Blocks("not reentrant", p=0.0)
    x = torch.randn(4, 2, 8)
    Clipper(model, 1, engine="fused", verify="never").backward(model, x)
    assert not vars(x)


@pytest.mark.parametrize("mode", MODES[1:])
def test_no_activation_of_a_segment_is_kept(mode):
    """Else checkpoints would save nothing; the first layer is outside of all of them."""
    assert activations_alive("none") >= 1 + 4
    assert activations_alive(mode) <= 1


def activations_alive(mode):
    """Return how many results of layers are left when the forward pass ends."""
    torch.manual_seed(0)
    model, made, found = Blocks(mode, depth=4, p=0.0), [], []

    def note(module, args, output):
        made.append(StorageWeakRef(output.untyped_storage()))

    def loss_fn(x):
        losses = model(x)
        found.append(sum(not each.expired() for each in made))
        return losses

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(note)
    Clipper(model, 4, engine="fused", verify="never").backward(loss_fn, torch.randn(8, 5, 8))
    return found[-1]


@pytest.mark.parametrize("mode", MODES[1:])
def test_memory_of_a_segment_that_runs_again_is_counted(mode, monkeypatch):
    """A memory budget relies on it: one block's activations, not those of all."""
    meters = []

    class Meter(memory.MemoryMeter):
        def __init__(self, known):
            super().__init__(known)
            meters.append(self)

    monkeypatch.setattr(memory, "MemoryMeter", Meter)
    x = torch.randn(8, 5, 8)
    for each in ("none", mode):
        model = Blocks(each, depth=10, p=0.0)
        Clipper(model, 4, engine="fused", verify="never").backward(model, x)
    plain, checkpointed = meters
    assert checkpointed.saved < plain.saved
    inputs = 10 * x.nbytes  # of the segments
    assert checkpointed.peak >= inputs + 2 * x.nbytes  # the second layer's input, and tanh's output


def tiny(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).double()
    if kind == "Llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=24)
        return transformers.LlamaForCausalLM(config).double()
    config = transformers.Qwen2Config(
        **sizes, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=True
    )
    return transformers.Qwen2ForCausalLM(config).double()


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("b", [1, 2])
def test_transformers(kind, use_reentrant, b):
    model = tiny(kind)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    model.train()
    ids = torch.randint(0, 24, (4, 7))

    def losses(ids):
        logits = model(input_ids=ids).logits[:, :-1]
        return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1)

    parameters = list(model.parameters())
    gradients = reference.microbatch_gradients(losses, parameters, ids.split(b))
    sizes = [b] * (4 // b)
    wanted, norms, _ = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])
    outcome = Clipper(model, b, engine="fused", verify="never").backward(losses, ids)
    assert outcome.engine == "fused"
    torch.testing.assert_close(outcome.norms.tolist(), norms, rtol=1e-9, atol=0)
    properties.assert_close([p.grad for p in parameters], wanted, 1e-9)
