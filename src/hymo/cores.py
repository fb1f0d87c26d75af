"""How many of the host's cores a process may use."""

import os


def own_cores() -> int:
    """This process's share of the cores that it may run on: torchrun's processes of a host share them evenly.

    torch's own number of threads is no guide: torchrun sets it to one, however many cores there are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
