"""The ceiling of benchmarks.evidence: the reference's encoder, trained on the truth itself.

In: the evidence folder, whose phantom knows which layers lie in each token of those who train. Out: an
encoder that says what the images allow. Architecture, volumes a step, optimizer and number of steps are the
reference's, but nothing is masked or augmented, and a linear head on every token learns layer occupancy.
Those who validate the other arms train too, and weight decay is on every weight.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.truth_tokens import layer_occupancy
from data_setup.loader import evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.phantom.truth import read_truth_file
from data_setup.store.reader import PreparedStore
from models.vit3d import VisionTransformer3D
from models.vjepa3d import build_encoder
from pretraining.schedules import learning_rate
from utils.config.schema import Config
from utils.runtime.open import open_runtime

SMALLEST = 1e-6  # a layer whose share varies less than this is not rescaled


def has_truth(root: Path) -> bool:
    """Whether the pre-training people of this folder are a phantom's."""
    return (root / "pretraining" / "synthetic.json").exists()


def supervised_encoder(cfg: Config, root: Path, seed: int, steps: int) -> VisionTransformer3D:
    """An encoder of `cfg` after `steps` updates on the truth, with the optimizer and schedule of `cfg`."""
    store = PreparedStore.open(cfg.data.store)
    runtime = open_runtime(cfg.train.use_bf16)
    torch.manual_seed(seed)
    encoder = build_encoder(cfg).to(runtime.device).train()
    rows = np.asarray(store.kept)
    batch_size = cfg.train.global_batch_size
    rng = np.random.default_rng(seed)
    epochs = -(-steps * batch_size // len(rows))
    order = np.concatenate([rng.permutation(rows) for _ in range(epochs)])[: steps * batch_size]
    shares = {int(row): occupancy_of_row(store, root, cfg, int(row)) for row in np.unique(order)}
    every = np.concatenate(list(shares.values()))
    centre, scale = (torch.from_numpy(x).to(runtime.device) for x in (every.mean(0), every.std(0) + SMALLEST))
    head = nn.Linear(encoder.width, len(centre)).to(runtime.device)
    weights = [*encoder.parameters(), *head.parameters()]
    optim = cfg.optim
    first, second = optim.betas
    optimizer = torch.optim.AdamW(
        weights, optim.base_lr, (first, second), optim.eps, weight_decay=optim.weight_decay
    )
    for step, cpu_batch in enumerate(evaluation_batches(cfg, store, order, batch_size)):
        truth_BNL = torch.from_numpy(np.stack([shares[int(row)] for row in cpu_batch["row"]]))
        batch, weight_BN = runtime.to_device(cpu_batch), runtime.to_device(cpu_batch)["context_valid"]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step, steps)
        with runtime.autocast():
            features_BNE = encoder(plain_view(batch))
        wanted_BNL = (truth_BNL.to(runtime.device) - centre) / scale
        error_BN = (head(features_BNE.float()) - wanted_BNL).square().mean(-1)
        optimizer.zero_grad(set_to_none=True)
        ((error_BN * weight_BN).sum() / weight_BN.sum()).backward()
        torch.nn.utils.clip_grad_norm_(weights, optim.clip_grad_norm)
        optimizer.step()
    return encoder.eval()


def occupancy_of_row(store: PreparedStore, root: Path, cfg: Config, row: int) -> np.ndarray:
    """Share of each layer in each token of a pre-training volume, float32 [N, L]."""
    record = store.index.loc[row]
    truth = read_truth_file(str(root / "pretraining"), record)
    return layer_occupancy(truth, record, cfg.spatial).astype(np.float32)
