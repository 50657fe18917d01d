"""One file a data set: what it is, and how its tree is found.

In: nothing. Out: PLUGS by name, in the order of `list`; and the sets of single images with the reason why
they have no plug. retouch.py is the shortest one to read first.
"""

from __future__ import annotations

from data_setup.index.sets import (
    duke_amd,
    duke_dme,
    fairvision,
    neh_ut,
    octa500,
    octave,
    octrima,
    oimhs,
    olives,
    retouch,
    srinivasan,
)
from data_setup.index.sets.facts import Plug

_MODULES = (
    octa500,
    duke_amd,
    duke_dme,
    srinivasan,
    retouch,
    olives,
    neh_ut,
    oimhs,
    octave,
    fairvision,
    octrima,
)
PLUGS: dict[str, Plug] = {module.PLUG.name: module.PLUG for module in _MODULES}
_SINGLE = "single B-scans, chosen one by one; this model reads volumes, and no eye can be put together again"
NO_VOLUMES = {
    "kermany": f"Kermany 2018 (84,484 JPEG): {_SINGLE}",
    "octdl": f"OCTDL (2,064 JPEG): {_SINGLE}",
    "octid": f"OCTID (500 JPEG): one image an eye; {_SINGLE}",
    "oct5k": f"OCT5k (1,672 images): {_SINGLE}",
    "goals": f"GOALS (300 circle scans): {_SINGLE}",
    "rvo_me": f"RVO-ME (3,012 B-scans): {_SINGLE}",
    "octmnist": f"OCTMNIST (109,309 small images of Kermany): {_SINGLE}",
}
