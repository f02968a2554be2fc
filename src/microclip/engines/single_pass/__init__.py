"""The single-pass engine: one forward and one backward over the whole batch, for every b.

The gradient of a weight that multiplies rows is a sum of outer products, one per row: of the input
and the gradient of the output. So one ordinary backward pass holds everything: the norm of each
micro-batch's part of the sum and, once the rule has decided, the weighted sum itself.

`tracker` follows which example owns each row through every operation: `owners` is the algebra of
owners, `propagation` has a rule for each kind of operation, and `shortcuts` speed up what most
models do most of the time. `recorder` keeps the weights' gradients out of the backward pass and
records what each use of a parameter contributes: `handlers` lists the functions it knows (from
`products`, `elementwise`, `convolution`, `norms` and `recurrent`) and does the others by vmap;
`derived` is for tensors made of parameters alone. `contributions` and `rows` are the algebra of
contributions, with `native` for its largest products. `memory` decides what to keep and how much to
take at once, `verify` when to check; `chunk` collects the contributions, and `engine` ties it all
together.

Other packages that need per-example gradients call `contributions_of`, and ask `free_memory` how
much they may hold. Both are imported on first use, since the engine takes a moment to load.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microclip.engines.single_pass.memory import free_memory
    from microclip.engines.single_pass.per_example import PerExampleGradients, contributions_of

__all__ = ["PerExampleGradients", "contributions_of", "free_memory"]

_MODULES = {
    "PerExampleGradients": "per_example",
    "contributions_of": "per_example",
    "free_memory": "memory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
