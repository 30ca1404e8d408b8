"""The reference of the configuration is that of the models, whole and up to date."""

from __future__ import annotations

from pathlib import Path

import yaml

from paceline.cluster.section import Section
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.config.reference import DEFAULTS, comments, reference

ROOT = Path(__file__).parents[4]


def keys() -> list[str]:
    found = []
    for name, field in PacelineConfig.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            found += [f"{name}.{key}" for key in model.model_fields]
        else:
            found.append(name)
    return found


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "python -m paceline.deploy.config.reference > docs/configuration.md"


def test_every_key_has_its_row_and_its_line_in_the_defaults() -> None:
    page = reference()
    defaults = yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))
    for key in keys():
        assert f"| `{key}` |" in page
        section, _, name = key.rpartition(".")
        assert name in (defaults[section] if section else defaults), key


def test_comments_go_on_over_lines_and_belong_to_their_section() -> None:
    text = "a: 1\nb:   # of b\n  c: 2   # of c\n         # and more\n  d: x\n"
    assert comments(text) == {"a": "", "b": "of b", "b.c": "of c and more", "b.d": ""}
