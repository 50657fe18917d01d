"""The public sets: what each is, and how its tree is found, one section of a file a set.

In: nothing. Out: PLUGS by name, in the order of `list`; and the sets of single images with the reason why
they have no plug. RETOUCH in files.py is the shortest one to read first.
"""

from __future__ import annotations

from data_setup.index.sets.facts import Plug
from data_setup.index.sets.files import FAIRVISION, OCTAVE, RETOUCH
from data_setup.index.sets.folders import NEH_UT, OIMHS, OLIVES, SRINIVASAN
from data_setup.index.sets.matlab import DUKE_AMD, DUKE_DME, OCTA500, OCTRIMA

_EVERY = [OCTA500, DUKE_AMD, DUKE_DME, SRINIVASAN, RETOUCH, OLIVES]
_EVERY += [NEH_UT, OIMHS, OCTAVE, FAIRVISION, OCTRIMA]
PLUGS: dict[str, Plug] = {plug.name: plug for plug in _EVERY}
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
