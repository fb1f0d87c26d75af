"""Reading and writing configurations: YAML files with ``base:``, ``--section.key value``, and faults in plain words.

Every fault of a file is found in one pass and said in one line each: the key, what was found, what is accepted, and
the nearest right name.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BeforeValidator, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from hymo.config import SECTIONS, ConfigError, HyMoConfig, SourceConfig, faults_across

# Options that the original design notes name and that never had an effect: refused with what to use instead.
RETIRED_KEYS = {
    "mup_init": "it never had an effect: initialisation is model.gdn_init and hymo.models.init",
    "cuda_graphs_mla": "it never had an effect; training.cuda_graphs replays whole micro-batches",
    "master_weights_dtype": "it never had an effect: parameters are kept in float32 and computed in "
    "training.fsdp_mixed_precision",
}


NOT_YAML = (YAMLError, ValueError, RecursionError)  # the last two: a date such as 2024-13-45, lists in lists


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)  # YAML 1.2: 1e-4 is a number, and a key given twice is an error
    yaml.default_flow_style = False
    return yaml


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML file as a nested dict, with its ``base:`` (a file relative to it, or a shipped name) underneath."""
    return _read_yaml(path, seen=())


def _read_yaml(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError([f"base: {path} inherits from itself"])
    try:
        data = _yaml().load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"]) from None
    except NOT_YAML as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError([f"{where}: not YAML: {str(problem).splitlines()[0]}"]) from None
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: found a {type(data).__name__}; accepted: sections {', '.join(SECTIONS)}"])
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError([f"{path}: base: found {base!r}; accepted: the path of a YAML file, or a shipped name"])
    below = path.parent / base
    shipped = shipped_configs() / f"{base}.yaml"
    if not below.is_file() and shipped.is_file():
        below = shipped
    return merge(_read_yaml(below, (*seen, path.resolve())), data)


# Two ways to say one thing: naming the one in a file or flag puts aside the other of the file underneath.
RIVALS = {"total_steps": "total_tokens", "warmup_steps": "warmup_frac", "decay_steps": "decay_frac"}
RIVALS |= {there: here for here, there in RIVALS.items()}


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``, section by section."""
    out = {key: value for key, value in below.items() if above.get(RIVALS.get(key, "")) is None}
    for key, value in above.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """``--section.key value``, ``--section.key=value`` or ``section.key=value`` as a nested dict.

    Values are read as YAML, so ``true``, ``1e-4``, ``null`` and ``[0.3, 0.1]`` mean what they mean in a file. Where a
    key takes text, the word itself is the value, with its blanks, ``#`` and ``:``; quotes around it are taken off.
    """
    out: dict[str, Any] = {}
    faults, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        section, dot, key = name.partition(".")
        if not dot or not key or (not equals and not word.startswith("--")):
            faults.append(f"{word}: found an argument that is no option; accepted: --section.key value")
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                faults.append(f"{name}: found no value; accepted: --{name} VALUE")
                continue
            text = rest.pop(0)
        out.setdefault(section, {})[key] = _value(section, key, text)
    if faults:
        raise ConfigError(faults)
    return out


def _value(section: str, key: str, text: str) -> Any:
    """The word of an option as the value it names."""
    field = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
    kinds = _type_words(field.annotation).split("|") if field is not None else []
    begins = {"text": ("'", '"'), "paths": ("'", '"', "[", "{")}  # what is YAML all the same
    kind = "text" if "text" in kinds else "paths" if (section, key) == ("data", "source") else None
    if kind is not None and not text.startswith(begins[kind]) and not (text == "null" and "null" in kinds):
        return text
    try:
        return _yaml().load(text) if text else ""
    except NOT_YAML:
        return text


def shipped_configs() -> Path:
    """The folder of the configurations that come with the package."""
    inside = Path(__file__).parent / "configs"  # in a wheel
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"  # in a checkout


def find_config(name: str | Path | None) -> Path:
    """A file, or the name of a shipped configuration (None = tiny)."""
    name = "tiny" if name is None else name
    path = Path(name)
    if path.is_file():
        return path
    shipped = sorted(p.stem for p in shipped_configs().glob("*.yaml"))
    if str(name) in shipped:
        return shipped_configs() / f"{name}.yaml"
    near = difflib.get_close_matches(path.stem, shipped, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError([f"{name}: no such file; accepted: a YAML file or one of {', '.join(shipped)}{hint}"])


def load_config(path: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> HyMoConfig:
    """Read a configuration.

    Args:
        path: a YAML file or the name of a shipped one; None is ``tiny``.
        overrides: ``["--training.seed", "3"]``, ``["training.seed=3"]`` or ``{"training": {"seed": 3}}``.

    Raises:
        ConfigError: with one line for every fault.
    """
    data = read_yaml(find_config(path))
    above = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    return build_config(merge(data, above))


def build_config(data: Mapping[str, Any]) -> HyMoConfig:
    """A nested dict as a checked configuration; raises ConfigError with every fault."""
    try:
        config = HyMoConfig.model_validate(dict(data))
    except ValidationError as error:
        lines = [_fault_line(fault) for fault in error.errors()]
        raise ConfigError(list(dict.fromkeys(lines))) from None
    faults = faults_across(config)
    if faults:
        raise ConfigError(faults)
    return config


def _fault_line(fault: Any) -> str:
    """One pydantic fault in our words."""
    loc = [str(part) for part in fault["loc"] if not str(part).startswith(("function-", "literal["))]
    key, kind, found, ctx = ".".join(loc[:2]) or "config", fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(loc, found)
    if kind in ("value_error", "assertion_error"):
        message = fault["msg"].removeprefix("Value error, ")
        return message if message.split(".")[0] in SECTIONS else f"{key}: {message}"
    return f"{key}: found {_short(found)}; accepted: {_accepted(loc, kind, ctx, fault['msg'])}"


def _short(value: Any, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _unknown_key(loc: list[str], found: Any) -> str:
    name, inside = loc[-1], loc[:-1]
    known = list(SECTIONS[inside[0]].model_fields) if inside and inside[0] in SECTIONS else list(SECTIONS)
    if inside[:2] == ["data", "source"]:
        known = list(SourceConfig.model_fields)
    where = ".".join(loc)
    if name in RETIRED_KEYS:
        return f"{where}: refused; {RETIRED_KEYS[name]}"
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    elsewhere = [f"{s}.{name}" for s, section in SECTIONS.items() if name in section.model_fields]
    if elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    elif near:
        hint = f"did you mean {'.'.join([*inside, near[0]])}?"
    else:
        hint = f"accepted: {', '.join(known)}"
    return f"{where}: unknown key (found {_short(found)}); {hint}"


def _accepted(loc: list[str], kind: str, ctx: Mapping[str, Any], message: str) -> str:
    if kind == "literal_error":
        field = SECTIONS[loc[0]].model_fields[loc[1]] if len(loc) > 1 and loc[0] in SECTIONS else None
        choices = get_args(field.annotation) if field is not None else ()
        words = [str(c).lower() if isinstance(c, bool) else str(c) for c in choices]
        extra = ""
        if loc[-1] == "fsdp_mixed_precision":
            extra = " (float16 would need loss scaling; bfloat16 has float32's range)"
        return (", ".join(words) if words else message) + extra
    bounds = {"greater_than_equal": ("ge", ">="), "greater_than": ("gt", ">"), "less_than_equal": ("le", "<="),
              "less_than": ("lt", "<")}  # fmt: skip
    if kind in bounds:
        name, sign = bounds[kind]
        return f"a number {sign} {ctx[name]}"
    types = {"int_type": "a whole number", "float_type": "a number", "bool_type": "true or false",
             "string_type": "text", "list_type": "a list", "tuple_type": "a list", "model_type": "a section of keys",
             "dict_type": "a section of keys", "missing": "as many values as the default has",
             "finite_number": "a finite number"}  # fmt: skip
    return types.get(kind, message[:1].lower() + message[1:])


# ------------------------------------------------------------------------------------------------------------- writing
def to_dict(config: HyMoConfig) -> dict[str, Any]:
    """The resolved configuration as plain lists, dicts and numbers."""
    return config.model_dump(mode="json")


def to_yaml(config: HyMoConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    stream = io.StringIO()
    yaml = _yaml()
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # keep the sections' own order
    yaml.dump(to_dict(config), stream)
    return stream.getvalue()


def derived_values(config: HyMoConfig) -> dict[str, int]:
    """What follows from the keys: printed by ``--print-config`` and by ``hymo plan``."""
    s = config.scheduler
    assert s.total_steps is not None
    return {
        "tokens_per_step": config.tokens_per_step,
        "total_steps": s.total_steps,
        "warmup_steps": s.warmup_steps or 0,
        "stable_steps": s.stable_steps,
        "decay_steps": s.decay_steps or 0,
        "total_tokens": s.total_steps * config.tokens_per_step,
    }


def describe_keys(sections: Iterable[str] = SECTIONS) -> list[tuple[str, str, str, str]]:
    """(key, accepted, default, meaning) of every key: for ``--help``, the docs and the check of the YAML files."""
    rows = []
    for name in sections:
        for key, field in SECTIONS[name].model_fields.items():
            default = (
                "null"
                if field.default is None
                else str(field.default).lower()
                if isinstance(field.default, bool)
                else str(list(field.default) if isinstance(field.default, tuple) else field.default)
            )
            meaning = " ".join((field.description or "").split())
            rows.append((f"{name}.{key}", _type_words(field.annotation), default, meaning))
    return rows


def _type_words(annotation: Any) -> str:
    """`int | None` and the like in the words of a YAML file."""
    names = {int: "int", float: "float", bool: "bool", str: "text", type(None): "null", list: "list", tuple: "list"}
    if annotation in names:
        return names[annotation]
    if getattr(annotation, "__origin__", None) is Literal:
        return "|".join(str(a).lower() if isinstance(a, bool) else str(a) for a in get_args(annotation))
    if getattr(annotation, "__origin__", None) in (list, tuple):
        return "list"
    if getattr(annotation, "__origin__", None) is dict:
        return "map"
    parts = [_type_words(a) for a in get_args(annotation) if not isinstance(a, BeforeValidator)]
    return "|".join(dict.fromkeys(parts)) or str(annotation)
