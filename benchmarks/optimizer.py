"""The optimizer benchmark as a script: the same as ``hymo bench optimizer`` (see ``hymo.bench.optimizer``)."""

from hymo.bench.optimizer import main

if __name__ == "__main__":
    raise SystemExit(main())
