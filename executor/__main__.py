"""`python -I -m executor`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    gc.disable()  # until all is imported and open, for nothing of it is garbage: a fifth of the start
    from executor.start import start

    return start()


if __name__ == "__main__":
    sys.exit(main())
