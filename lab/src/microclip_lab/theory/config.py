"""What a user may choose about `microclip theory`. Imports nothing heavy, so `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from microclip_lab.theory.symbols import check, check_order


@dataclass(frozen=True)
class TheoryConfig:
    """Compute what the convergence theorems say of every micro-batch size b, and draw it.

    Each theorem bounds the gradient norm that T steps reach by a bias, which stays however long
    one trains, and a transient, which fades with T. For every b there is the bound as the
    paper prints it (where it applies: epsilon > 1/(b+1)) and two corrected ones: for any noise,
    and for symmetric noise as the paper assumes it. Ends with a table, a picture, and a CSV file.

    The constants are the paper's where it names them: 20,000 steps, B = 512, c = 5.74. Epsilon,
    sigma, L and the gap are not in the paper: set your own. Takes a second or two.

    Rare but long draggers, little noise: small b isolates them, and there is a best b in between:
      microclip theory --c 20 --sigma 0.1

    A c that falls with b, fast enough for the printed bias to have a best b in between:
      microclip theory --c 200 --c-slope -0.7

    Where the paper's statements fail, with the numbers on both sides:
      microclip theory --claims

    Train under the very assumptions of the theorems, at every b, beside the bounds:
      microclip theory --simulate --steps 400 --batch-size 64
    """

    out: Path = Path("theory-output")
    """Folder for the picture and the table."""
    epsilon: float = 0.2
    """The share of draggers among the examples, from 0 to below 1."""
    c: float = 5.74
    """Least length of a dragger's gradient, in units of |g|; 5.74 is the paper's at b = 4."""
    c_most: float | None = None
    """C, the greatest such length; the same as c unless given."""
    c_slope: float = 0.0
    """1 + c is multiplied by b to this power, 1 + C likewise; the paper measured about -0.05."""
    sigma: float = 1.0
    """Standard deviation of a benign example's gradient."""
    smoothness: float = 1.0
    """L, how fast the gradient of the loss may change."""
    gap: float = 10.0
    """L_0 - L_*, how far the loss can fall."""
    steps: int = 20_000
    """T, the number of optimizer steps."""
    batch_size: int = 512
    """B, the number of examples per step."""
    microbatch_sizes: tuple[int, ...] | None = None
    """The sizes b; powers of two up to the batch size unless given."""
    claims: bool = False
    """Also print the paper's statements that fail, each with an instance."""
    simulate: bool = False
    """Also train a quadratic that keeps all assumptions, at every b; some milliseconds a step."""

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
                "microbatch_sizes must name at least one size; leave it out for powers of two."
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
        """The micro-batch sizes, from the smallest."""
        if self.microbatch_sizes is not None:
            return tuple(sorted(set(self.microbatch_sizes)))
        return tuple(2**k for k in range(self.batch_size.bit_length()))

    def lengths(self, b: int) -> tuple[float, float]:
        """Return c and C at this b."""
        most = self.c if self.c_most is None else self.c_most
        low, high = ((1 + length) * b**self.c_slope - 1 for length in (self.c, most))
        return max(0.0, low), max(0.0, high)
