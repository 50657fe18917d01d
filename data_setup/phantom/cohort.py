"""Who is in the phantom: participants with their labels, latent factors, splits and scan plans.

In: the number of participants and a seed. Out: `Participant` records in a fixed order. Nothing here depends
on pixels. The label comes first (AI-READI proportions), a latent severity scatters around it, and every
anatomical factor follows from severity, age and the person's own variation, so neighbouring classes
overlap. Sites, devices, eyes and scan placement are drawn independently of the label, within each class in
rotation, so that none of them can stand in for it.
"""

import datetime
from dataclasses import dataclass

import numpy as np

from data_setup.protocols import PROTOCOLS, Protocol

STUDY_GROUPS = (
    "healthy",
    "pre_diabetes_lifestyle_controlled",
    "oral_medication_and_or_non_insulin_injectable_medication_controlled",
    "insulin_dependent",
)
GROUP_COUNTS_V3 = (776, 560, 686, 258)  # participants per group in AI-READI 3.0.0
SITES = ("UW", "UCSD", "UAB")
SITE_DIGIT = {"UW": 1, "UCSD": 4, "UAB": 7}
SPLIT_FRACTIONS = {"train": 0.69, "val": 0.155, "test": 0.155}
MAX_PARTICIPANTS = 2700  # 900 ids per leading digit

# Strength of each sign per unit of severity (0 healthy ... 3 insulin dependent) and the person's own spread.
# These numbers set the difficulty; docs/concepts/phantom.md records what was measured with them.
SEVERITY_SPREAD = 0.22


@dataclass(frozen=True)
class Factors:
    """What shapes a person's two eyes. Scales are factors around 1; lengths are mm; rates are per eye."""

    severity: float
    age: int
    rnfl: float
    gcl_ipl: float
    inl: float
    onl: float
    choroid_mm: float
    vessel_calibre: float
    vessel_density: float
    drusen_rate: float
    foci_rate: float
    cyst_rate: float
    srf_probability: float
    pit_width_mm: float
    disc_u_mm: float
    disc_v_mm: float
    disc_radius_mm: float
    cup_depth_mm: float


@dataclass(frozen=True)
class Scan:
    """One planned volume: protocol, eye, repeat number and its index among the person's scans."""

    protocol: Protocol
    laterality: str  # "L" | "R"
    repeat: int
    index: int


@dataclass(frozen=True)
class Participant:
    """One person: the participants.tsv row, the latent factors and the scans to make."""

    index: int
    person_id: str
    clinical_site: str
    study_group: str
    age: int
    study_visit_date: str
    split: str
    factors: Factors
    scans: tuple[Scan, ...]


def draw_factors(label: int, rng: np.random.Generator) -> Factors:
    """The factors of a person of class `label` (0..3)."""
    severity = label + SEVERITY_SPREAD * rng.standard_normal()
    age = int(np.clip(np.rint(rng.normal(59.0 + 1.5 * label, 10.5)), 40, 92))
    decades = (age - 60) / 10
    normal = rng.standard_normal(8)
    return Factors(
        severity=severity,
        age=age,
        rnfl=float(np.clip(1.10 - 0.10 * severity - 0.02 * decades + 0.045 * normal[0], 0.55, 1.4)),
        gcl_ipl=float(np.clip(1.12 - 0.13 * severity - 0.02 * decades + 0.045 * normal[1], 0.5, 1.4)),
        inl=float(np.clip(0.93 + 0.10 * severity + 0.045 * normal[2], 0.7, 1.5)),
        onl=float(np.clip(1.0 - 0.01 * decades + 0.06 * normal[3], 0.75, 1.3)),
        choroid_mm=float(np.clip(0.310 - 0.018 * decades - 0.022 * severity + 0.045 * normal[4], 0.12, 0.46)),
        vessel_calibre=float(np.clip(0.93 + 0.06 * severity + 0.05 * normal[5], 0.7, 1.4)),
        vessel_density=float(np.clip(1.05 - 0.05 * severity + 0.08 * normal[6], 0.6, 1.4)),
        drusen_rate=float(
            np.clip(2.0 + 4.0 * max(decades, -0.4) + 1.0 * severity, 0.2, 40) * rng.gamma(2, 0.5)
        ),
        foci_rate=float(max(severity, 0.0) ** 1.5 * 9.0 * rng.gamma(8, 1 / 8) + 0.5),
        cyst_rate=float(max(severity - 0.9, 0.0) ** 1.4 * 3.2 * rng.gamma(5, 1 / 5)),
        srf_probability=float(np.clip(0.02 + 0.11 * max(severity - 1.2, 0.0), 0, 0.5)),
        pit_width_mm=float(np.clip(rng.normal(0.50, 0.05), 0.36, 0.66)),
        disc_u_mm=float(rng.normal(4.5, 0.2)),
        disc_v_mm=float(rng.normal(-0.7, 0.2)),
        disc_radius_mm=float(np.clip(rng.normal(0.86, 0.07), 0.68, 1.05)),
        cup_depth_mm=float(np.clip(0.28 + 0.10 * normal[7], 0.05, 0.55)),
    )


def quota(total: int, weights: tuple[float, ...]) -> list[int]:
    """Whole numbers that add up to `total` in the proportion of `weights` (largest remainders)."""
    exact = np.asarray(weights, dtype=float) / np.sum(weights) * total
    counts = np.floor(exact).astype(int)
    for i in np.argsort(-(exact - counts), kind="stable")[: total - counts.sum()]:
        counts[i] += 1
    return counts.tolist()


def spread_splits(num: int) -> list[str]:
    """Split names for `num` people in class order, each fraction spread evenly along that order."""
    splits, given = [], dict.fromkeys(SPLIT_FRACTIONS, 0)
    for i in range(num):
        owed = {name: (i + 0.5) * part - given[name] for name, part in SPLIT_FRACTIONS.items()}
        name = max(owed, key=owed.__getitem__)
        given[name] += 1
        splits.append(name)
    return splits


def plan_scans(rank: int, rng: np.random.Generator) -> tuple[Scan, ...]:
    """2-4 volumes for one person: a macular one first, protocols rotate with `rank`, at times a repeat."""
    macular = [p for p in PROTOCOLS if p.is_volume and p.region.startswith("Macula")]
    laterality = "RL"[int(rng.integers(2))]
    scans = [Scan(macular[rank % len(macular)], laterality, 0, 0)]
    for i in range(1, int(rng.integers(2, 5))):
        protocol = PROTOCOLS[(rank * 3 + i * 5 + rank // len(PROTOCOLS)) % len(PROTOCOLS)]
        side = "RL"[int(rng.integers(2))]
        repeat = sum(s.protocol is protocol and s.laterality == side for s in scans)
        scans.append(Scan(protocol, side, repeat, i))
    if rng.random() < 0.06:
        scans.append(Scan(scans[0].protocol, laterality, 1, len(scans)))
    return tuple(scans)


def scans_of_every_device() -> tuple[Scan, ...]:
    """Both eyes on each device, with the first of its protocols that is a volume of the macula."""
    first: dict[str, Protocol] = {}
    for protocol in PROTOCOLS:
        if protocol.is_volume and protocol.region.startswith("Macula"):
            first.setdefault(protocol.device, protocol)
    pairs = [(protocol, side) for side in "RL" for protocol in first.values()]
    return tuple(Scan(protocol, side, 0, index) for index, (protocol, side) in enumerate(pairs))


def make_participants(num: int, seed: int, every_device: bool = False) -> list[Participant]:
    """`num` participants in the order of their ids. ValueError when `num` is outside 1..2700. `every_device`:
    scans_of_every_device in place of a plan of 2-4 scans; the people are the same.
    """
    if not 1 <= num <= MAX_PARTICIPANTS:
        raise ValueError(f"participants: expected 1..{MAX_PARTICIPANTS} (4-digit ids), found {num}")
    rng = np.random.default_rng([seed, 0xC0])
    labels = np.repeat(np.arange(len(STUDY_GROUPS)), quota(num, GROUP_COUNTS_V3))
    splits = spread_splits(num)
    ids = {digit: iter(rng.permutation(900) + 1000 * digit) for digit in (1, 4, 7, 9)}
    people = []
    site_offset, plan_offset = rng.integers(3), rng.integers(len(PROTOCOLS))
    within = np.concatenate([rng.permutation(np.count_nonzero(labels == k)) for k in np.unique(labels)])
    for i, label in enumerate(labels.tolist()):
        site = SITES[(within[i] + site_offset) % len(SITES)]
        digit = 9 if rng.random() < 0.08 else SITE_DIGIT[site]
        person_id = str(next(ids[digit]))
        person_rng = np.random.default_rng([seed, 0xA1, int(person_id)])
        factors = draw_factors(label, person_rng)
        day = datetime.date(2023, 7, 19) + datetime.timedelta(days=int(person_rng.integers(650)))
        people.append(
            Participant(
                index=i,
                person_id=person_id,
                clinical_site=site,
                study_group=STUDY_GROUPS[label],
                age=factors.age,
                study_visit_date=day.isoformat(),
                split=splits[i],
                factors=factors,
                scans=scans_of_every_device()
                if every_device
                else plan_scans(int(i + plan_offset), person_rng),
            )
        )
    return sorted(people, key=lambda p: p.person_id)
