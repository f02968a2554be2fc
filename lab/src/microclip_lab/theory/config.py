"""The options of `microclip theory`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from microclip_lab.theory.symbols import check, check_order


@dataclass(frozen=True)
class TheoryConfig:
    """Compute and plot what the convergence theorems say about every micro-batch size b.

    Each theorem bounds the gradient norm after T steps by a bias, which stays however long you
    train, and a transient, which fades with T. For every b there is the bound as printed in the
    paper (where it applies: epsilon > 1/(b+1)) and two corrected ones: for any noise, and for
    symmetric noise as the paper assumes. Writes a table, a plot and a CSV file.

    The constants are the paper's where it states them: 20,000 steps, B = 512, c = 5.74. Epsilon,
    sigma, L and the gap are not in the paper: set your own. Takes a second or two.

    Rare but long draggers, little noise: small b isolates them, and the best b is in between:
      microclip theory --c 20 --sigma 0.1

    A c that falls with b fast enough for the printed bias to have its best b in between:
      microclip theory --c 200 --c-slope -0.7

    The statements of the paper that fail, with the numbers on both sides:
      microclip theory --claims

    Simulate training under the assumptions of the theorems, at every b:
      microclip theory --simulate --steps 400 --batch-size 64
    """

    out: Path = Path("theory-output")
    """Folder for the plot and the table."""
    epsilon: float = 0.2
    """The share of draggers among the examples, from 0 to below 1."""
    c: float = 5.74
    """Smallest norm of a dragger's gradient, in units of |g|; the paper has 5.74 at b = 4."""
    c_most: float | None = None
    """C, the largest such norm. Default: c."""
    c_slope: float = 0.0
    """1 + c and 1 + C are multiplied by b to this power; the paper measured about -0.05."""
    sigma: float = 1.0
    """Standard deviation of a benign example's gradient."""
    smoothness: float = 1.0
    """L, the smoothness of the loss."""
    gap: float = 10.0
    """L_0 - L_*, how far the loss can fall."""
    steps: int = 20_000
    """T, the number of optimizer steps."""
    batch_size: int = 512
    """B, the number of examples per step."""
    microbatch_sizes: tuple[int, ...] | None = None
    """The sizes b. Default: powers of two up to the batch size."""
    claims: bool = False
    """Also print the paper's statements, each checked on an instance."""
    simulate: bool = False
    """Also train on a quadratic that satisfies all assumptions, at every b; takes longer."""

    def __post_init__(self) -> None:
        check(
            epsilon=self.epsilon,
            sigma=self.sigma,
            L=self.smoothness,
            gap=self.gap,
            T=self.steps,
            B=self.batch_size,
        )
        check_order(self.c, self.c if self.c_most is None else self.c_most)
        if not self.sizes:
            raise ValueError(
                "microbatch_sizes must have at least one size; leave it out for powers of two."
            )
        for b in self.sizes:
            check(b=b)
            if b > self.batch_size:
                raise ValueError(
                    f"microbatch_sizes must not exceed the batch size {self.batch_size}, "
                    f"but got {b}."
                )
            if self.simulate and self.batch_size % b:
                raise ValueError(
                    f"microbatch_sizes must divide the batch size {self.batch_size} to be "
                    f"simulated, but got {b}."
                )
        if not -5 <= self.c_slope <= 5:
            raise ValueError(f"c_slope must be between -5 and 5, but got {self.c_slope}.")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes, ascending."""
        if self.microbatch_sizes is not None:
            return tuple(sorted(set(self.microbatch_sizes)))
        return tuple(2**k for k in range(self.batch_size.bit_length()))

    def lengths(self, b: int) -> tuple[float, float]:
        """Return c and C at this b."""
        most = self.c if self.c_most is None else self.c_most
        low, high = ((1 + length) * b**self.c_slope - 1 for length in (self.c, most))
        return max(0.0, low), max(0.0, high)
