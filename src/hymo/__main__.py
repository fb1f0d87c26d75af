"""``python -m hymo`` is ``hymo``; under torchrun: ``torchrun --nproc-per-node N -m hymo train CONFIG``."""

import sys

from hymo.cli import main

if __name__ == "__main__":
    sys.exit(main())
