"""Write the tables of docs/configuration.md from the types: ``python docs/make_configuration.py``."""

from pathlib import Path

from hymo.config import SECTIONS
from hymo.config_io import describe_keys

PAGE = Path(__file__).with_name("configuration.md")
BEGIN = "<!-- tables below are written by docs/make_configuration.py -->\n"


def tables() -> str:
    """One table a section: key, accepted, default, meaning."""
    parts = []
    for section, kind in SECTIONS.items():
        parts.append(f"\n## {section}\n\n{(kind.__doc__ or '').strip()}\n\n")
        parts.append("| key | accepted | default | meaning |\n|---|---|---|---|\n")
        for key, accepted, default, meaning in describe_keys([section]):
            cells = (f"`{key}`", accepted, f"`{default}`" if default else "", meaning)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


if __name__ == "__main__":
    head = PAGE.read_text(encoding="utf-8").split(BEGIN)[0]
    PAGE.write_text(head + BEGIN + tables(), encoding="utf-8")
