"""The recurrence benchmark as a script: the same as ``hymo bench recurrence`` (see ``hymo.bench.recurrence``)."""

from hymo.bench.recurrence import main

if __name__ == "__main__":
    raise SystemExit(main())
