"""data_setup/loader.py: the global batch is a function of (seed, step), whoever computes it."""

import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.evidence.arms import JEPA
from data_setup import loader as loader_module
from data_setup import order as order_module
from data_setup.loader import (
    Loader,
    LoaderError,
    LostWorkerError,
    TrainingSamples,
    evaluation_batches,
    start_early,
    validation_batches,
)
from data_setup.order import MOST_PASSES, TURN, DataOrder
from data_setup.resample import Resampled
from data_setup.store.format import RECORD_COLUMNS
from data_setup.store.reader import PreparedStore, VolumeReader
from data_setup.store.writer import StoreWriter, measure
from data_setup.transforms import token_valid
from utils import workers as workers_module
from utils.config.load import load_config
from utils.config.schema import Config
from utils.errors import ConfigError
from utils.runtime import patience
from utils.storage import StorageAwayError, StorageError

ROOT = Path(__file__).resolve().parents[2]
SIZE = (8, 24, 32)
BOX = (1, 8, 2, 22, 0, 32)
DEVICES = ["topcon_triton"] * 7 + ["zeiss_cirrus"] * 4 + ["heidelberg_spectralis"] * 2
NUM = len(DEVICES)
BATCH = 8


def small_config(*overrides: str) -> Config:
    base = [f"spatial.image_size={list(SIZE)}", "data.workers=0", f"train.global_batch_size={BATCH}", *JEPA]
    return load_config(ROOT / "configs" / "smoke_test.yaml", [*base, *overrides])


@pytest.fixture(scope="module")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prepared store of 13 small volumes of three devices, one reject in between."""
    url = str(tmp_path_factory.mktemp("loader") / "store")
    writer = StoreWriter(url)
    cfg = small_config()
    writer.create(cfg.spatial, "nowhere", synthetic=True)
    devices = [*DEVICES[:3], "topcon_triton", *DEVICES[3:]]
    records = [
        dict.fromkeys(RECORD_COLUMNS)
        | {"person_id": f"9{i:03d}", "device": device, "path": f"{i}.dcm", "sop_instance_uid": f"2.25.{i}"}
        for i, device in enumerate(devices)
    ]
    rows = writer.append_records(records)
    for row in rows:
        if row == 3:
            writer.write_row(row, None, {"status": "truncated_pixel_data"})
            continue
        voxels = np.zeros(SIZE, np.uint8)
        d0, d1, h0, h1, w0, w1 = BOX
        inside = np.random.default_rng(row).integers(1, 255, (d1 - d0, h1 - h0, w1 - w0))
        voxels[d0:d1, h0:h1, w0:w1] = inside
        fields = measure(Resampled(voxels, BOX, cfg.spatial.target_spacing, 0.0))
        writer.write_row(row, voxels, fields | {"status": "kept"})
    writer.finalise(rows)
    return url


@pytest.fixture
def store(store_url: str) -> PreparedStore:
    return PreparedStore.open(store_url)


def merged(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Micro-batches of all ranks as one global batch, in the order of the positions."""
    joined = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
    order = joined["position"].argsort()
    return {key: value[order] for key, value in joined.items()}


def global_batches(
    cfg: Config, store: PreparedStore, world: int, accum: int, start: int, steps: int
) -> list[dict[str, torch.Tensor]]:
    ranks = [
        Loader(cfg, store, store.kept, rank=r, world=world, accum=accum, start_step=start, num_steps=steps)
        for r in range(world)
    ]
    return [merged([b for micro in parts for b in micro]) for parts in zip(*ranks, strict=True)]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize(
    ("world", "accum", "workers"), [(1, 1, 2), (2, 1, 0), (1, 4, 1), (2, 2, 0), (4, 2, 0)]
)
def test_world_accumulation_and_workers_change_nothing(
    store: PreparedStore, world: int, accum: int, workers: int
) -> None:
    plain = global_batches(small_config(), store, 1, 1, 0, 4)
    other = global_batches(small_config(f"data.workers={workers}"), store, world, accum, 0, 4)
    for a, b in zip(plain, other, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("sampling", ["natural", "device_balanced"])
def test_resume_continues_exactly(store: PreparedStore, sampling: str) -> None:
    cfg = small_config(f"data.sampling={sampling}")
    whole = global_batches(cfg, store, 1, 1, 0, 40)
    for a, b in zip(whole[20:], global_batches(cfg, store, 1, 1, 20, 20), strict=True):
        assert_equal(a, b)


def test_batches_are_the_promised_plain_tensors(store: PreparedStore) -> None:
    cfg = small_config()
    (batch,) = next(iter(Loader(cfg, store, store.kept, num_steps=1)))
    n = 2 * 3 * 4
    k, m = round(cfg.method.context_ratio * n), round(cfg.method.target_ratio * n)
    expected = {
        "volume": (torch.uint8, SIZE),
        "matrix": (torch.float32, (3, 4)),
        "valid_box": (torch.float32, (6,)),
        "mean": (torch.float32, ()),
        "std": (torch.float32, ()),
        "intensity": (torch.float32, (2, 3)),
        "noise_seed": (torch.int64, (2,)),
        "sample_seed": (torch.int64, ()),
        "context": (torch.int64, (k,)),
        "target": (torch.int64, (m,)),
        "context_valid": (torch.float32, (k,)),
        "target_valid": (torch.float32, (m,)),
        "token_valid": (torch.bool, (24,)),
        "row": (torch.int64, ()),
        "position": (torch.int64, ()),
    }
    assert {key: (v.dtype, tuple(v.shape[1:])) for key, v in batch.items()} == expected
    assert {type(v) for v in batch.values()} == {torch.Tensor}
    assert {len(v) for v in batch.values()} == {BATCH}
    assert len(set(batch["sample_seed"].tolist())) == BATCH
    assert len(np.unique(batch["matrix"].numpy(), axis=0)) == BATCH
    index = store.index.loc[batch["row"].numpy()]
    assert np.allclose(batch["mean"], index["intensity_mean"])
    assert np.allclose(batch["std"], index["intensity_std"])


@pytest.mark.parametrize(("world", "accum"), [(1, 1), (2, 2), (4, 1), (1, 8)])
def test_every_epoch_visits_each_volume_once(store: PreparedStore, world: int, accum: int) -> None:
    """13 volumes, batches of 8: epochs end inside batches."""
    rows = {}
    for batch in global_batches(small_config(), store, world, accum, 0, 13):
        rows.update(zip(batch["position"].tolist(), batch["row"].tolist(), strict=True))
    assert sorted(rows) == list(range(13 * BATCH))
    epochs = [[rows[p] for p in range(e * NUM, (e + 1) * NUM)] for e in range(BATCH)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(store.kept)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)  # each in another order


def test_the_order_depends_on_the_seed() -> None:
    rows = np.arange(50)
    first, same, other = ([DataOrder(s, rows).row(p) for p in range(50)] for s in (0, 0, 1))
    assert first == same
    assert first != other
    with pytest.raises(ValueError, match="at least one store row"):
        DataOrder(0, np.array([], int))


def test_device_balanced_shows_each_device_equally_often(
    store: PreparedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "MOST_PASSES", 9.0)  # two volumes of one device are no rare device
    kept = store.index.loc[store.kept]
    order = DataOrder(0, store.kept, list(kept["device"]))
    rows = [order.row(p) for p in range(3 * 4 * 7)]
    seen = Counter(kept.loc[rows, "device"])
    assert set(seen.values()) == {28}
    for start in range(0, len(rows), 3):
        assert len(set(kept.loc[rows[start : start + 3], "device"])) == 3
    triton = [r for r in rows if kept.loc[r, "device"] == "topcon_triton"]
    for start in range(0, 28, 7):  # within a device every epoch visits each volume once
        assert len(set(triton[start : start + 7])) == 7
    turns = {tuple(kept.loc[rows[s : s + 3], "device"]) for s in range(0, len(rows), 3)}
    assert len(turns) == 6  # no device has a place of its own in the batch


@pytest.mark.parametrize("sizes", [(900, 60, 40), (500, 499, 1), (30, 10), (996, 2, 2)])
def test_device_balanced_shows_no_volume_of_a_rare_device_too_often(sizes: tuple[int, ...]) -> None:
    """At most twice as often as volumes are shown on the mean, but one in each long turn."""
    devices = [name for name, size in zip("abc", sizes, strict=False) for _ in range(size)]
    order = DataOrder(0, np.arange(len(devices)), devices)
    drawn = 8 * TURN
    rows = Counter(order.row(p) for p in range(drawn))
    seen = Counter(devices[row] for row in rows.elements())
    for name, size in zip("abc", sizes, strict=False):
        most = max(MOST_PASSES * drawn * size / len(devices), drawn / TURN)
        assert seen[name] <= 1.01 * max(most, 1)
        assert order.passes(drawn)[name] == pytest.approx(seen[name] / size, rel=0.01)
        own = [rows[row] for row, device in enumerate(devices) if device == name]
        assert max(own) - min(own) <= 1, "every epoch of a device visits each of its volumes once"
    if min(sizes) > 1:
        assert seen["a"] / drawn < sizes[0] / len(devices), "the largest device gives some of its share"
    equal = DataOrder(0, np.arange(20), ["a"] * 12 + ["b"] * 8)
    assert Counter("ab"[row >= 12] for row in map(equal.row, range(40))) == {"a": 20, "b": 20}


def test_a_batch_that_cannot_be_shared_is_an_error(store: PreparedStore) -> None:
    with pytest.raises(ConfigError, match="multiple of world size 3 x accumulation 1, found 8"):
        Loader(small_config(), store, store.kept, world=3, num_steps=1)


def store_with(kind: type[VolumeReader], url: str) -> PreparedStore:
    """The store, read by another class."""
    store = PreparedStore.open(url)
    whole = store.volumes
    store.volumes = kind(whole.url, whole.options, whole.cache_dir, whole.rows, whole.digests)
    return store


class ThreadCountVolumes(VolumeReader):
    def read(self, row: int, compare: bool = False) -> np.ndarray:
        return np.full(SIZE, torch.get_num_threads(), np.uint8)


class FailingVolumes(VolumeReader):
    """Reads normally until one row."""

    def read(self, row: int, compare: bool = False) -> np.ndarray:
        if row == 5:
            self.fail()
        return super().read(row, compare)

    def fail(self) -> None:
        raise ValueError("row 5 is broken")


class UnreadableVolumes(FailingVolumes):
    def fail(self) -> None:
        raise StorageError("gs://bucket/store/c.5: expected a chunk, found damage")


class AwayVolumes(FailingVolumes):
    def fail(self) -> None:
        raise StorageAwayError("gs://bucket/store/c.5: gave up after 8 attempts")


class DyingVolumes(FailingVolumes):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class HangingVolumes(FailingVolumes):
    def fail(self) -> None:
        time.sleep(60)


@pytest.mark.parametrize(
    ("cpus", "processes", "workers"), [(1, 1, 1), (2, 1, 1), (8, 1, 7), (240, 1, 32), (128, 8, 15), (4, 8, 1)]
)
def test_null_workers_are_a_process_share_of_the_cpus(
    store: PreparedStore, monkeypatch: pytest.MonkeyPatch, cpus: int, processes: int, workers: int
) -> None:
    """A host of a TPU v4 has 240 CPUs for one process, a machine with eight GPUs shares them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    loader = Loader(small_config("data.workers=null"), store, np.arange(3), num_steps=1)
    assert loader._batches.num_workers == workers
    assert Loader(small_config(), store, np.arange(3), num_steps=1)._batches.num_workers == 0


def test_a_worker_gets_the_arrays_of_its_rows_and_not_the_index(store: PreparedStore) -> None:
    """Pickled bytes a row: box 24, spacing 24, statistics 8, row 8, checksum 16, and 8 of the data order."""
    count = 100_000
    one = store.index.loc[[int(store.kept[0])]]
    index = one.loc[one.index.repeat(count)].assign(
        row=np.arange(count), path=[f"{n}.dcm" for n in range(count)]
    )
    large = PreparedStore(store.url, None, None, store.attrs, index.set_index("row", drop=False))
    for sampling in ("natural", "device_balanced"):
        cfg = small_config(f"data.sampling={sampling}")
        loader = Loader(cfg, large, large.kept, num_steps=1)
        size = len(pickle.dumps(loader.dataset, protocol=pickle.HIGHEST_PROTOCOL))
        assert size / count < 100
        samples = TrainingSamples(cfg, store, store.kept)
        there = pickle.loads(pickle.dumps(samples))
        for key, value in there[(0, 3)].items():
            np.testing.assert_array_equal(value, samples[(0, 3)][key])


def test_the_fork_server_starts_early_where_there_will_be_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(loader_module.forkserver, "ensure_running", lambda: started.append(True))
    start_early(small_config("data.workers=0").data)
    assert started == []
    start_early(small_config("data.workers=1").data)
    assert started == [True]


def test_workers_use_one_torch_thread(store_url: str) -> None:
    cfg = small_config("data.workers=1", "augment.strength=0")
    loader = Loader(cfg, store_with(ThreadCountVolumes, store_url), np.arange(3), num_steps=1)
    assert (next(iter(loader))[0]["volume"] == 1).all()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (FailingVolumes, ValueError, "row 5 is broken"),
        (UnreadableVolumes, LoaderError, r"^rank 0, step \d+: .*gs://bucket/store/c\.5: expected[^\n]*$"),
        (AwayVolumes, LostWorkerError, r"^rank 0, step \d+: .*gs://bucket/store/c\.5: gave up[^\n]*$"),
        (DyingVolumes, LostWorkerError, r"step \d+, .*loader worker 0 of 1: .*dead worker: .*pid\(s\) \d+"),
        pytest.param(
            HangingVolumes,
            LoaderError,
            r"step \d+, .*loader worker 0 of 1: .*within 1 s, found none after",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_worker_that_fails_dies_or_hangs_is_named(
    store_url: str,
    kind: type[VolumeReader],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader_module, "POLL_SECONDS", 0.5)
    if kind is HangingVolumes:
        monkeypatch.setattr(patience, "DATA_S", 1.0)
    cfg = small_config("data.workers=1")
    store = store_with(kind, store_url)
    start = time.monotonic()
    with pytest.raises(error, match=message):
        for _ in Loader(cfg, store, store.kept, num_steps=10):
            pass
    assert time.monotonic() - start < 300, "long before patience.DATA_S is over"


@pytest.mark.parametrize("lost", [ConnectionResetError("reset by peer"), EOFError("end of file")])
def test_a_worker_that_dies_while_it_hands_over_a_batch_is_named(store_url: str, lost: Exception) -> None:
    """As when a signal to all processes of a run finds it there; the run may then have been asked to stop."""
    loader = Loader(small_config("data.workers=2"), PreparedStore.open(store_url), np.arange(3), num_steps=9)

    def batches() -> Iterator[dict]:
        raise lost
        yield {}

    message = f"step 3, micro-batch 0, waiting for loader worker 1 of 2: expected a batch, .* died .*: {lost}"
    with pytest.raises(LoaderError, match=message):
        loader._next(batches(), 3, 3)


def test_evaluation_batches_change_nothing(store: PreparedStore) -> None:
    cfg = small_config()
    batches = list(evaluation_batches(cfg, store, store.kept, 5))
    assert [len(b["row"]) for b in batches] == [5, 5, 3]
    assert torch.cat([b["row"] for b in batches]).tolist() == list(store.kept)
    for batch in batches:
        for row, volume in zip(batch["row"].tolist(), batch["volume"], strict=True):
            assert np.array_equal(volume.numpy(), store.read(row))
        assert torch.equal(batch["matrix"], torch.eye(3, 4).expand(len(batch["row"]), -1, -1))
        assert (batch["intensity"] == torch.tensor([1.0, 1.0, 0.0])).all()
        assert torch.equal(batch["context"][0], torch.arange(24))
        valid = token_valid(batch["matrix"], batch["valid_box"], cfg.grid, cfg.spatial.patch_size)
        assert torch.equal(batch["context_valid"].bool(), valid)
        assert "target" not in batch


def test_validation_masks_are_fixed(store: PreparedStore) -> None:
    first = merged(list(validation_batches(small_config(), store, store.kept, 5)))
    second = merged(list(validation_batches(small_config("seed=7"), store, store.kept[::-1], 3)))
    assert_equal(first, second)
    assert len(np.unique(first["target"].numpy(), axis=0)) == NUM  # each row its own mask
    train = next(iter(Loader(small_config(), store, store.kept, num_steps=1)))[0]
    assert first.keys() == train.keys()


def test_null_workers_keep_to_the_quota_of_a_container(
    store: PreparedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(200)))
    monkeypatch.setattr(workers_module, "CPU_QUOTA", tmp_path / "cpu.max")
    for text, count in (("400000 100000\n", 3), ("max 100000\n", 32)):
        (tmp_path / "cpu.max").write_text(text)
        loader = Loader(small_config("data.workers=null"), store, np.arange(3), num_steps=1)
        assert loader._batches.num_workers == count
