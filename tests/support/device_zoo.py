"""The models of the zoo on a device and on the host, for the child process of `device_cells`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from microclip import Clipper

STEPS, ORDINARY = 6, (2, 4, 5)
# models that read values themselves, or index by them
READING = {"frozen_and_unused", "hf_bert", "hf_t5", "hf_wav2vec2_bert"}


def compare(name: str, engine: str, device: str, counting: Callable[[], Any]) -> dict[str, Any]:
    """Return how a model trained on a device differs from the same one on the host."""
    there, reads = _train(name, engine, device, counting)
    here, _ = _train(name, engine, "cpu", counting)
    pairs = zip(there.parameters(), here.parameters(), strict=True)
    differences = [(a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs]
    return {"difference": max(differences), "reads": reads}


def _train(
    name: str, engine: str, device: str, counting: Callable[[], Any]
) -> tuple[nn.Module, list[dict[str, int]]]:
    import zoo  # which imports transformers

    torch.manual_seed(len(name))
    case = zoo.MODELS[name](torch.float32)
    # else models with tied weights would come apart, on devices that torch does not know
    torch.__future__.set_swap_module_params_on_conversion(True)
    case.model.train().to(device)
    torch.__future__.set_swap_module_params_on_conversion(False)
    given = dict(case.batch) if hasattr(case.batch, "items") else case.batch
    batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), given)
    clipper = Clipper(case.model, 2, engine=engine)
    optimizer = torch.optim.SGD(case.parameters, 0.01)
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with counting() as counts:
            clipper.backward(case.each_loss_fn or case.loss_fn, batch)
        optimizer.step()
        found.append(dict(counts.reads))
    return case.model, found
