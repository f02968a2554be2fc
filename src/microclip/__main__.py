"""`python -m microclip`, for launchers that start a module on every process."""

import sys

from microclip.cli import main

if __name__ == "__main__":
    sys.exit(main())
