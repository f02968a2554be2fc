"""Ways in which a user's model can mislead the single pass, tried out.

An attack is a tiny model and a few batches, one after the other. The first batch is harmless where
what is meant to go wrong can start later: all lengths are full, every row goes to the first
expert, a branch is not taken. An engine may be exact or refuse; it may not be wrong, nor crash.

The attacks themselves are in `attack_cases`.

    python tests/support/attacks.py                        all of them, fused and auto, b = 1
    python tests/support/attacks.py --sizes 1 3 B --dtypes float64 float32 --only routing

"""

import argparse
import logging
import sys
import time

import torch

from attack_cases import ATTACKS, attempt
from verdicts import default_dtype, is_bad, summary

__all__ = ["ATTACKS", "attempt", "default_dtype"]


def table(attacks, engines, sizes, dtypes, say=print):
    """Try attacks with each engine, size and precision; return all verdicts."""
    found = []
    for each in attacks:
        for engine in engines:
            for b in sizes:
                for dtype in dtypes:
                    said = attempt(each, engine, b, dtype)
                    found.append((each, engine, b, dtype, said))
                    cell = f"{engine:6s} b={b or 'B'} {str(dtype)[6:]}"
                    say(f"{str(each)[:58]:58s} {cell:22s} {said[:110]}")
    return found


def size(text):
    return None if text == "B" else int(text)


def arguments(argv):
    parser = argparse.ArgumentParser(description="Attack the single pass.")
    parser.add_argument("--engines", nargs="+", default=["fused", "auto"])
    parser.add_argument("--sizes", nargs="+", type=size, default=[1], help="numbers, or B")
    parser.add_argument("--dtypes", nargs="+", default=["float64"])
    parser.add_argument("--only", default="", help="a cause, or a part of a name")
    parser.add_argument("--bad", action="store_true", help="show nothing but mistakes")
    return parser.parse_args(argv)


def main(argv=None):
    options = arguments(argv)
    torch.set_num_threads(1)
    logging.getLogger("microclip").setLevel(logging.ERROR)  # it says when it gives up, as it should
    chosen = [each for each in ATTACKS if options.only in str(each)]
    dtypes = [getattr(torch, name) for name in options.dtypes]
    say = (lambda line: None) if options.bad else print
    start = time.perf_counter()
    found = table(chosen, options.engines, options.sizes, dtypes, say)
    if options.bad:
        for each, engine, b, dtype, said in found:
            if is_bad(said):
                print(f"{each}, {engine}, b={b or 'B'}, {str(dtype)[6:]}: {said}")
    print(f"{len(chosen)} attacks in {time.perf_counter() - start:.0f} s")
    for engine in options.engines:
        print(f"{engine:9s}", summary(row[-1] for row in found if row[1] == engine))
    return any(is_bad(row[-1]) for row in found)


if __name__ == "__main__":
    sys.exit(main())
