"""One torch optimizer whose groups carry their algorithm: what NorMuon, CautiousAdamW and Optimizers share.

An algorithm is a module-level record (`Algorithm`): its settings with defaults, a check, the eager state of a parameter
and one step over all groups that use it. Rates are float64 scalars on the parameters' device, filled in place, so that
a schedule never makes the host wait; `set_factor` returns the same rates as Python floats for logs.
"""

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from hymo.distributed.exchange_plan import BUCKET_BYTES

Group = dict[str, Any]
BOOKKEEPING = ("params", "param_names", "lr", "base_lr", "initial_lr")  # group keys that are no settings
# Settings that may change between steps at no cost; others but the fixed ones make the next step prepare itself anew.
LIVE = {"momentum", "betas", "eps", "weight_decay", "embed_weight_decay", "cautious_wd", "nesterov", "mask", "decay"}
FIXED = ("algorithm", "normalize", "axis", "row_blocks", "embedding")  # what a group is, and what state it has


@dataclass(frozen=True)
class Algorithm:
    """name; settings with their defaults; check(group) raises ValueError; state(param, group) -> tensors by name;
    step(groups, state) updates every parameter that has a gradient."""

    name: str
    defaults: dict[str, Any]
    check: Callable[[Group], None]
    state: Callable[[Tensor, Group], dict[str, Tensor]]
    step: Callable[["GroupedOptimizer", list[Group]], None]


ALGORITHMS: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> None:
    ALGORITHMS[algorithm.name] = algorithm


def gradient(param: Tensor, dtype: torch.dtype) -> Tensor:
    """This process's part of a parameter's gradient (there must be one) in `dtype`; never changed by a caller."""
    assert param.grad is not None
    return local(param.grad).to(dtype)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels can run there: on CUDA, or anywhere in Triton's interpreter (a switch for debugging)."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds (a plain tensor: itself)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def target(param: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The full-precision values to update: the float32 copy where one is kept, else the parameter (local part)."""
    return local(state.get("master", param)).detach()


def common_state(param: Tensor) -> dict[str, Tensor]:
    """A float32 copy for parameters held in half precision, else nothing."""
    return {"master": param.detach().float().clone()} if param.dtype in (torch.bfloat16, torch.float16) else {}


def state_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def group_name(group: Group, index: int) -> str:
    """Name of parameter `index` of the group for messages."""
    return group["param_names"][index] if "param_names" in group else f"parameter {index} of its group"


def check_gradients(groups: list[Group]) -> None:
    """Raise ValueError, before anything is changed, for a gradient that is sparse or not laid out like its parameter.

    A partial gradient taken for the whole one would give each process another update. Comparing the layouts is one
    comparison of identities where the gradient shares its parameter's, as FSDP2's do.
    """
    for group in groups:
        for i, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None:
                continue
            plain = type(grad) is Tensor and type(param) is torch.nn.Parameter
            same = plain or getattr(grad, "_spec", None) is getattr(param, "_spec", None)
            if same and grad.layout is torch.strided:
                continue
            if grad.layout is not torch.strided:
                raise ValueError(f"{group_name(group, i)}: found a gradient of {grad.layout}, accepted: a dense one")
            here, there = _place(param), _place(grad)
            if here != there:
                raise ValueError(
                    f"{group_name(group, i)}: found a gradient as {_where(there)}, accepted: one laid out like the "
                    f"parameter, as {_where(here)}; DTensor.redistribute sums a partial gradient"
                )


def _place(tensor: Any) -> tuple[Any, Any] | None:
    """(mesh, placements) of a DTensor, None of a plain tensor."""
    return (tensor.device_mesh, tuple(tensor.placements)) if hasattr(tensor, "device_mesh") else None


def _where(place: tuple[Any, Any] | None) -> str:
    return "a plain tensor" if place is None else f"{place[1]} on {place[0]}"


class GroupedOptimizer(torch.optim.Optimizer):
    """Groups may name `algorithm` (default: the class's own) and any setting of that algorithm.

    State exists from construction (float32, like its parameter), so checkpoints of the first step and of the last hold
    the same keys on every process. Half-precision parameters get a float32 copy; after writing into such a parameter
    by hand call `refresh_masters()`.

    A setting that is changed in `param_groups` counts from the next step on (`FIXED` ones are refused there).
    `momentum` and `betas[0]` are one setting, so a schedule may move either.

    share_replicas: plain tensors of a job of several processes are replicas with equal gradients, whose matrices the
    processes share; set it to False before the first step if they are not. bucket_bytes: see `plan_exchange`.
    """

    share_replicas = True
    bucket_bytes = BUCKET_BYTES
    kept: tuple[str, ...] = ("share_replicas", "bucket_bytes")  # what a copy takes along beside groups and state

    def __init__(self, params: Iterable[Any], defaults: Group):
        self.prepared: dict[frozenset[Tensor], list[Any]] = {}  # steps by the parameters that have a gradient
        self.seen: list[Group] = []  # the settings of each group at the last step
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, fill in its settings, check them and make its state."""
        group = dict(param_group)
        name = group.setdefault("algorithm", self.defaults.get("algorithm"))
        for home in ("hymo.optim.normuon", "hymo.optim.cautious_adamw"):  # whichever was imported, groups know both
            importlib.import_module(home)
        if name not in ALGORITHMS:
            raise ValueError(f"algorithm: found {name!r}, accepted: {', '.join(sorted(ALGORITHMS))}")
        algorithm = ALGORITHMS[name]
        known = {*algorithm.defaults, *BOOKKEEPING, "algorithm"}
        if unknown := sorted(set(group) - known):
            raise ValueError(f"{unknown[0]}: not a setting of {name}, accepted: {', '.join(sorted(known))}")
        own = self.defaults if name == self.defaults.get("algorithm") else {}
        for key, value in algorithm.defaults.items():
            group.setdefault(key, own.get(key, value))
        group.setdefault("lr", self.defaults.get("lr"))
        group["base_lr"] = _check_rate(group["lr"])
        super().add_param_group(group)
        group = self.param_groups[-1]
        for key in set(group) - known:  # defaults of another algorithm, put there by torch
            del group[key]
        try:
            for i, param in enumerate(group["params"]):
                if not param.is_floating_point():
                    raise ValueError(
                        f"{group_name(group, i)}: found {param.dtype}, accepted: real floating-point numbers"
                    )
            algorithm.check(group)
        except (ValueError, NotImplementedError):
            self.param_groups.pop()
            raise
        if not isinstance(group["lr"], Tensor) and group["params"]:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64, device=group["params"][0].device)
        for param in group["params"]:
            self.state[param] = common_state(param) | algorithm.state(param, group)
        self.prepared.clear()
        self.seen.append(own_settings(group))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self.kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After copying or unpickling: what was prepared belongs to other tensors."""
        super().__setstate__(state)
        self.prepared = {}
        self.seen = [own_settings(group) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; others, and every gradient, stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_changes()
        check_gradients(self.param_groups)
        for name, algorithm in ALGORITHMS.items():
            if groups := [g for g in self.param_groups if g["algorithm"] == name]:
                algorithm.step(self, groups)
        return loss

    def _take_changes(self) -> None:
        """Check the settings that were changed since the last step and go on with them."""
        for i, (group, seen) in enumerate(zip(self.param_groups, self.seen, strict=True)):
            changed = [key for key, value in seen.items() if group[key] is not value and group[key] != value]
            if not changed:
                continue
            for key in FIXED:
                if key in changed:
                    raise ValueError(
                        f"group {i} {key}: found {group[key]!r} instead of {seen[key]!r}, on which the state depends; "
                        "accepted: a new optimizer"
                    )
            if "momentum" in seen and ("momentum" in changed) != ("betas" in changed):
                if "momentum" in changed:
                    group["betas"] = (group["momentum"], *group["betas"][1:])
                else:
                    group["momentum"] = group["betas"][0]
            ALGORITHMS[group["algorithm"]].check(group)
            if not LIVE.issuperset(changed):
                self.prepared.clear()
            self.seen[i] = own_settings(group)

    def rates(self, factor: float = 1.0) -> tuple[float, float]:
        """(lr_muon, lr_adamw) at `factor`: the first group's of each kind, 0.0 for a kind without groups."""
        rates = {"muon": 0.0, "adamw": 0.0}
        for group in reversed(self.param_groups):
            rates["adamw" if group["algorithm"] == "adamw" else "muon"] = group["base_lr"] * factor
        return rates["muon"], rates["adamw"]

    def set_factor(self, factor: float) -> tuple[float, float]:
        """Set every rate to base_lr * factor, in place; returns `rates(factor)`."""
        for group in self.param_groups:
            rate = group["base_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return self.rates(factor)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the float32 copies from the half-precision parameters again."""
        for param, state in self.state.items():
            if "master" in state:
                state["master"].copy_(param)

    def plans(self) -> list[Any]:
        """The plans (`ExchangePlan`) of a step in which every parameter has a gradient; `print` says what they cost.

        In a job of several processes all of them must call it.
        """
        from hymo.optim.matrix_step import prepare

        groups = [group for group in self.param_groups if group["algorithm"] != "adamw"]
        return [step.plan for step in prepare(groups, self.share_replicas, self.bucket_bytes)]

    def settings(self) -> list[dict[str, Any]]:
        """The settings of each group without rates, in plain JSON values: what a resumed run must agree on."""
        return [{k: _plain(v) for k, v in own_settings(g).items()} for g in self.param_groups]

    def check_settings(self, saved: list[dict[str, Any]]) -> None:
        """Raise ValueError that lists every setting that differs from `saved` (the result of `settings()`).

        What schedulers put into groups is no setting; momentum and betas are none where a scheduler cycles them.
        """
        own = self.settings()
        if len(own) != len(saved):
            raise ValueError(f"optimizer: {len(saved)} groups were saved, this one has {len(own)}")
        changes = [
            f"group {i} {key}: saved {_plain(old.get(key))!r}, now {new.get(key)!r}"
            for i, (old, new) in enumerate(zip(saved, own, strict=True))
            for key in sorted(new)
            if not (key in ("momentum", "betas") and (_cycled(old) or _cycled(self.param_groups[i])))
            and _plain(old.get(key)) != new.get(key)
        ]
        if changes:
            raise ValueError("optimizer settings changed: " + "; ".join(changes))

    def state_dict(self) -> dict[str, Any]:
        """Torch's, in plain values: an `Orthogonalizer` as text, so that torch.load takes it with weights_only."""
        state = super().state_dict()
        for group in state["param_groups"]:
            if is_dataclass(group.get("orthogonalize")):
                group["orthogonalize"] = str(group["orthogonalize"])
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *, allow_changed_settings: bool = False) -> None:
        """Copy saved state and rates into this optimizer, in place, keeping its dtypes and layout.

        Settings that differ from the saved ones raise ValueError; with allow_changed_settings this optimizer's are
        kept. `base_lr` is this optimizer's in any case.
        """
        saved_groups = state_dict["param_groups"]
        if not allow_changed_settings:
            self.check_settings(saved_groups)
        self.prepared.clear()
        for i, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            if len(group["params"]) != len(saved["params"]):
                raise ValueError(
                    f"group {i}: {len(saved['params'])} parameters were saved, {len(group['params'])} are here"
                )
            for j, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
                _copy_state(self.state[param], state_dict["state"].get(key, {}), group_name(group, j))
            own = own_settings(group)
            group.update({key: value for key, value in saved.items() if key not in own and key not in BOOKKEEPING})
            if _cycled(saved):
                group.update({key: saved[key] for key in ("momentum", "betas") if key in own})
            group["lr"].fill_(saved["lr"]) if isinstance(group["lr"], Tensor) else group.update(lr=float(saved["lr"]))


def own_settings(group: Group) -> Group:
    """The group's settings: its algorithm and that algorithm's, nothing that a scheduler put there."""
    return {key: group[key] for key in ("algorithm", *ALGORITHMS[group["algorithm"]].defaults)}


def _cycled(group: Group) -> bool:
    """Whether a scheduler of torch (OneCycleLR, CyclicLR) moves the group's momentum."""
    return "max_momentum" in group


def _copy_state(own: dict[str, Tensor], saved: dict[str, Tensor], name: str) -> None:
    if set(own) != set(saved):
        raise ValueError(f"{name}: state {sorted(saved)} was saved, this optimizer keeps {sorted(own)}")
    for key, tensor in own.items():
        if tensor.shape != saved[key].shape:
            raise ValueError(f"{name}: saved {key} has shape {tuple(saved[key].shape)}, here {tuple(tensor.shape)}")
        with torch.no_grad():
            tensor.copy_(saved[key])


def _check_rate(lr: Any) -> float:
    if lr is None:
        raise ValueError("lr: missing, accepted: a number from 0")
    rate = float(lr)
    if not rate >= 0:
        raise ValueError(f"lr: found {rate}, accepted: a number from 0")
    return rate


def _plain(value: Any) -> Any:
    """Tuples as lists, records as text: equal before and after a trip through JSON."""
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def check_number(group: Group, key: str, low: float, high: float = float("inf"), *, above: bool = False) -> None:
    """Raise ValueError unless low <= group[key] < high (low < with `above`)."""
    value = group[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value < high or (above and value == low):
        bound = f"a number {'above' if above else 'from'} {low:g}" + (
            "" if high == float("inf") else f" below {high:g}"
        )
        raise ValueError(f"{key}: found {value!r}, accepted: {bound}")


def check_choice(group: Group, key: str, accepted: Iterable[Any]) -> None:
    accepted = tuple(accepted)
    if group[key] not in accepted:
        raise ValueError(f"{key}: found {group[key]!r}, accepted: {', '.join(map(str, accepted))}")
