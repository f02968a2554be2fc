"""What each rank runs in the test of TRL on two ranks; child processes import it by name."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import stack_cells
import trl_runs

# stack, batch size per rank, b, engine, and further options
CELLS: dict[str, tuple[str, int, int | None, str, dict[str, Any]]] = {
    "sft": ("sft", 4, 1, "fused", {}),
    "sft streamed": ("sft", 4, 3, "stream", {}),
    "sft by tokens": ("sft", 4, 2, "auto", {"loss_mean": "step"}),
    "sft packed": ("sft", 2, 1, "fused", {}),
    "sft packed, by tokens": ("sft", 2, 2, "stream", {"loss_mean": "step"}),
    "dpo": ("dpo", 4, 1, "fused", {}),
    "dpo streamed": ("dpo", 4, 3, "stream", {}),
    "reward": ("reward", 4, 2, "auto", {}),
}


def every(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return for every cell the ids of each step on this rank, and its gradients."""
    stack_cells.launched(rank, world)
    warnings.simplefilter("ignore")
    found = {}
    for name, (stack, size, b, engine, options) in CELLS.items():
        watch = trl_runs.Watch()
        ids: list[Any] = []
        clip = {"microbatch_size": b, "engine": engine, "id_column": "id", **options}
        run = trl_runs.trainer(
            stack, trl_runs.model("llama", stack), clip=clip, watch=[watch, Ids(ids)],
            per_device_train_batch_size=size, folder=folder, logging_strategy="steps",
            logging_steps=1, **({"packing": True, "max_length": 24} if "packed" in name else {}),
        )  # fmt: skip
        watch_ids = next(c for c in run.callback_handler.callbacks if isinstance(c, Ids))
        watch_ids.run = run
        run.train()
        tokens = [entry["num_tokens"] for entry in run.state.log_history if "num_tokens" in entry]
        found[name] = ids, watch.gradients, tokens
    return found


class Ids(trl_runs.TrainerCallback):  # type: ignore[misc]
    """Keeps the ids of every step's micro-batches."""

    def __init__(self, ids: list[Any]) -> None:
        self.ids = ids
        self.run: Any = None

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.ids.append(self.run.clipper.outcome.ids)
