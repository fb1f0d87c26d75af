"""Named settings of other Muon codes, and conversion of rate and decay between their scale conventions."""

from typing import Any

from hymo.optim.update import shape_scale

_PLAIN: dict[str, Any] = {"normalize": False, "cautious_wd": False, "orthogonalize": "quintic"}

# Each entry holds what the origin does differently from this package's NorMuon; `lr` is the origin's own default.
PRESETS: dict[str, dict[str, Any]] = {
    # Keller Jordan's Muon.
    "keller": dict(_PLAIN, lr=0.02, weight_decay=0.0, scale="original"),
    # Moonlight, arXiv 2502.16982: RMS of an AdamW update, so the rate must be an AdamW rate: given by the user.
    "moonlight": dict(_PLAIN, lr=None, weight_decay=0.1, scale="match_rms_adamw"),
    # torch.optim.Muon.
    "torch": dict(_PLAIN, lr=1e-3, weight_decay=0.1, scale="original"),
    # NorMuon, arXiv 2510.05491, algorithm 1: no Nesterov, RMS exactly 0.2, plain decay.
    "paper": {
        "lr": None,
        "nesterov": False,
        "orthogonalize": "quintic",
        "scale": "fixed_rms",
        "cautious_wd": False,
        "normalize": True,
        "axis": "row",
    },
    # dion's NorMuon: its momentum is the sum form, whose direction is the same.
    "dion": {
        "lr": 0.01,
        "nesterov": False,
        "scale": "spectral",
        "weight_decay": 0.01,
        "cautious_wd": False,
        "axis": "row",
    },
    # modded-nanogpt's NorMuon: averages over the long side, decay by the square of the rate.
    "modded": {
        "lr": 0.023,
        "scale": "original",
        "weight_decay": 1.2,
        "axis": "long",
        "betas": (0.95, 0.9),
        "decay": "lr_squared",
    },
    # The form of the original design notes to the letter: five cubic steps, times the gradient's Frobenius norm.
    "cubic_frobenius": {
        "lr": 0.02,
        "nesterov": False,
        "orthogonalize": "cubic",
        "normalize": False,
        "scale": "grad_norm",
        "mask": "grad",
    },
}


def preset_settings(name: str | None) -> dict[str, Any]:
    """The settings of a preset (`lr` None = the user must give one); none for None."""
    if name is None:
        return {}
    if name not in PRESETS:
        raise ValueError(f"preset: found {name!r}, accepted: {', '.join(PRESETS)}")
    return PRESETS[name]


# What each convention multiplies the orthogonal factor by, and whether its decay is by the rate itself.
CONVENTIONS = {
    "original": "original",
    "keller": "original",
    "torch": "original",
    "match_rms_adamw": "match_rms_adamw",
    "moonlight": "match_rms_adamw",
    "spectral": "spectral",
    "dion": "spectral",
}


def convert_hparams(lr: float, weight_decay: float, *, source: str, to: str, m: int, n: int) -> tuple[float, float]:
    """(lr, weight_decay) under convention `to` that give the m x n matrix the step and the decay it had under `source`.

    The size of the step is lr * scale(m, n) and the decay lr * weight_decay, so a conversion is exact for one shape
    only; use the shape that holds most parameters. Conventions: scale modes or the names of the codes that use them.
    """
    for key, name in (("source", source), ("to", to)):
        if name not in CONVENTIONS:
            raise ValueError(f"{key}: found {name!r}, accepted: {', '.join(CONVENTIONS)}")
    if not (m >= 1 and n >= 1):
        raise ValueError(f"m, n: found {m}, {n}, accepted: integers from 1")
    ratio = shape_scale(CONVENTIONS[source], m, n) / shape_scale(CONVENTIONS[to], m, n)
    return lr * ratio, weight_decay / ratio
