"""The public sets: what each is, and how its tree is found: a section of catalogue.yaml, and code for some.

In: nothing. Out: PLUGS by name, in the order of `list`; and the sets of single images with the reason why
they have no plug. `srinivasan` in the catalogue is the shortest one to read first.
"""

from pathlib import Path
from typing import Any

import yaml

from data_setup.index.sets import owners
from data_setup.index.sets.facts import Plug

_CODE: dict[str, dict[str, Any]] = {
    "octa500": {"refine": owners.octa500},
    "duke_amd": {"read_labels": owners.duke_amd_labels},
    "duke_dme": {"read_labels": owners.duke_dme_labels},
    "retouch": {"refine": owners.retouch},
    "olives": {"refine": owners.olives},
    "oimhs": {"refine": owners.oimhs},
    "octave": {
        "refine": owners.octave,
        "read_classes": owners.octave_names,
        "label_classes": owners.OCTAVE_CLASSES,
    },
    "fairvision": {"refine": owners.fairvision},
    "octrima": {"read_labels": owners.octrima_labels},
}
_CATALOGUE = yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8"))
PLUGS = {name: Plug.of(name, section, **_CODE.get(name, {})) for name, section in _CATALOGUE["sets"].items()}
NO_VOLUMES = {name: f"{text} {_CATALOGUE['why']}" for name, text in _CATALOGUE["no_volumes"].items()}
