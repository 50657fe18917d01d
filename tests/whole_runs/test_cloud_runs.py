"""Whole runs from and into a bucket: upload, prepare, pre-train, resume, evaluate; with faults, the same."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from data_setup import prepare
from finetuning import evaluate
from pretraining import train
from tests.support.cloud_proxy import FAULTS, STALL, Schedule, fault_proxy, seeded
from tests.support.cloud_servers import BUCKET, gcs_server, log_in, s3_server, token_server
from tests.support.pipeline_factory import SMOKE, WITH_WANDB, make_phantom, pipeline_overrides, stop_after
from tests.support.process_factory import losses
from tests.support.wandb_reader import run_ids
from utils import storage
from utils.checkpoint import list_steps, load_checkpoint
from utils.config.schema import StorageOptions
from utils.errors import EXIT_STOPPED

pytestmark = pytest.mark.slow
PLANTED = "pl4nted-s3cret"  # must not come out anywhere


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_phantom(tmp_path_factory.mktemp("cloud") / "phantom", 12, "--transfer-syntax", "explicit")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    with ExitStack() as stack:
        yield {"gs": stack.enter_context(gcs_server()), "s3": stack.enter_context(s3_server())}


class Place:
    """A run whose tree, store and checkpoints are in a bucket, reached through an endpoint."""

    def __init__(self, scheme: str, endpoint: str, folder: Path, name: str) -> None:
        self.options = StorageOptions(endpoint_url=endpoint)
        self.root = f"{scheme}://{BUCKET}"
        self.name, self.folder = name, folder / name
        self.store = f"{self.root}/{name}/store"
        self.checkpoints = f"{self.root}/{name}/checkpoints"
        self.overrides = [
            *pipeline_overrides(self.folder),
            f"data.gcs_root={self.root}/phantom",
            f"data.store={self.store}",
            f"data.storage_options.endpoint_url={endpoint}",
            f"data.cache_dir={self.folder / 'cache'}",
            f"train.ckpt_dir={self.checkpoints}",
            WITH_WANDB,  # its files are searched for credentials
        ]

    def upload(self, tree: Path) -> None:
        files = [path for path in tree.rglob("*") if path.is_file()]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda p: self._upload(p, p.relative_to(tree)), files))

    def _upload(self, path: Path, name: Path) -> None:
        storage.write_bytes(f"{self.root}/phantom/{name}", path.read_bytes(), self.options)

    def run(self, stage: ModuleType, *arguments: str) -> int | None:
        """The exit code; the arguments come last, so that they win."""
        return stage.main(["--config", str(SMOKE), *self.overrides, *arguments])

    def objects(self, url: str) -> dict[str, bytes]:
        names = storage.find_names(url, self.options)
        with ThreadPoolExecutor(8) as pool:
            contents = pool.map(lambda n: storage.read_bytes(f"{url}/{n}", self.options), names)
            return dict(zip(names, contents, strict=True))


def a_tenth() -> Schedule:
    """A fault in 10 % of the requests; a stall costs its whole time limit, so there are two of them."""
    numbers, others = itertools.count(), seeded(0, 0.1, tuple(f for f in FAULTS if f != STALL))

    def schedule(method: str, target: str) -> str | None:
        fault = others(method, target)
        return STALL if next(numbers) in (50, 150) else fault

    return schedule


def contents(objects: dict[str, bytes]) -> dict[str, str]:
    """Name -> checksum of all of a store but its report, which has times, and its ledger."""
    others = "prepare_report.json", "ledger.jsonl"
    return {n: hashlib.sha256(b).hexdigest() for n, b in objects.items() if not n.startswith(others)}


def assert_nowhere(secret: str, objects: dict[str, bytes], *folders: Path) -> None:
    paths = [name for name, data in objects.items() if secret.encode() in data]
    for folder in folders:
        paths += [str(p) for p in folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    assert paths == []


@pytest.fixture(scope="module")
def logged_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Credentials of both clouds that are PLANTED, or are exchanged for a token that is."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    folder = tmp_path_factory.mktemp("login")
    with token_server(PLANTED) as token_uri, pytest.MonkeyPatch.context() as patch:
        account = {
            "type": "service_account",
            "project_id": "p",
            "private_key_id": PLANTED,
            "private_key": key.decode(),
            "client_email": "oct@p.iam.gserviceaccount.com",
            "token_uri": token_uri,
        }
        (folder / "account.json").write_text(json.dumps(account))
        # a checkpoint takes a second to arrive on a busy machine
        log_in(patch, PLANTED, first_wait_s=0.01, read_timeout_s=5)
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(folder / "account.json"))
        yield


@pytest.fixture(scope="module")
def plain(
    phantom: Path, servers: dict[str, str], logged_in: None, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    """A whole run without faults: two workers, a stop, a resume in a new directory, an evaluation."""
    place = Place("gs", servers["gs"], tmp_path_factory.mktemp("runs"), "plain")
    place.upload(phantom)
    assert place.run(prepare, "--workers", "2", "--audit") == 0
    with stop_after(4):
        assert place.run(train, "data.workers=1") == EXIT_STOPPED
    assert list_steps(place.checkpoints, place.options) == [2, 4]
    (place.folder / "run").rename(place.folder / "old_machine")
    assert place.run(train) == 0
    assert list_steps(place.checkpoints, place.options) == [6, 8]
    evaluate.main(["--config", str(SMOKE), *place.overrides])
    return place


def test_a_run_in_the_bucket_resumes_and_is_evaluated(plain: Place) -> None:
    rows = storage.list_names(f"{plain.store}/rows", plain.options)
    assert len(rows) == len(list((plain.folder / "cache").iterdir())) > 10
    run, before = plain.folder / "run", plain.folder / "old_machine"
    text = (run / "log.txt").read_text()
    assert text.index("stopped by SIGTERM at step 4") < text.index("resuming from step 4 of gs://")
    assert list(losses(run)) == list(range(1, 9))
    assert run_ids(run) == run_ids(before)
    assert json.loads((plain.folder / "run" / "evaluation.json").read_text())
    report = json.loads(storage.read_text(f"{plain.store}/prepare_report.json", plain.options))
    assert {kind: objects["count"] for kind, objects in report["run"]["audit"].items()} == {
        "missing": 0,
        "orphans": 0,
        "unused_missing": 0,
    }


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_with_faults_in_a_tenth_of_the_requests_the_results_are_the_same(
    scheme: str,
    phantom: Path,
    servers: dict[str, str],
    plain: Place,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with fault_proxy(servers[scheme]) as proxy:
        place = Place(scheme, proxy.endpoint, tmp_path, "faulty")
        proxy.schedule = a_tenth()
        if scheme == "s3":
            place.upload(phantom)
        assert place.run(prepare, "--workers", "0") == 0
        with stop_after(4):
            assert place.run(train) == EXIT_STOPPED
        assert place.run(train) == 0
        injected, asked = dict(proxy.faults), len(proxy.requests)
        proxy.schedule = lambda method, target: None
        store, checkpoints = place.objects(place.store), place.objects(place.checkpoints)
        faulty = load_checkpoint(f"{place.checkpoints}/step_00000008.pt", place.options)
    assert set(FAULTS) <= set(injected)
    assert 0.05 * asked < asked - injected["none"] < 0.2 * asked
    assert "gave up" not in caplog.text
    if scheme == "gs":
        assert contents(store) == contents(plain.objects(plain.store))
    else:  # the rows tell the URL and the ETag of their source
        volumes = {n: c for n, c in contents(store).items() if n.startswith("volumes/")}
        assert volumes == {
            n: c for n, c in contents(plain.objects(plain.store)).items() if n.startswith("volumes/")
        }
    whole = load_checkpoint(f"{plain.checkpoints}/step_00000008.pt", plain.options)
    assert faulty["model"].keys() == whole["model"].keys()
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(faulty["model"][name], tensor, rtol=0, atol=0)
    assert_nowhere(PLANTED, store | checkpoints, place.folder)
    console = capfd.readouterr()
    assert PLANTED not in caplog.text + console.out + console.err
    assert f"{place.store}/" in caplog.text  # the warnings name what they are about


def test_no_credential_leaves_the_environment(plain: Place) -> None:
    objects = plain.objects(plain.store) | plain.objects(plain.checkpoints)
    assert_nowhere(PLANTED, objects, plain.folder)
    assert_nowhere("PRIVATE KEY", objects, plain.folder)
