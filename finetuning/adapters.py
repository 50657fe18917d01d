"""Low-rank adapters (Hu et al. 2022, arXiv:2106.09685) on the linear layers of an encoder's blocks, by peft.

In: an encoder and a rank. Out: the same encoder whose blocks compute W x + B A x: A and B of this rank are
trained, W is not. B starts at 0, so a new adapter changes nothing; the sum has no other scale.
`merged_weights` adds B A to W: the weights of a plain encoder.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from finetuning.pooled import load_strictly
from models.vit3d import VisionTransformer3D
from models.vjepa3d import build_encoder
from utils.config.schema import Config
from utils.errors import UserError

# whole names of modules; the patches are none of them: their layer's weight is read past its forward
ADAPTED = r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(fc1|fc2))"
PART = "lora_"  # in the names of an adapter's parameters


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return PART in name


def add_adapters(encoder: VisionTransformer3D, rank: int) -> None:
    """Put adapters into the encoder, drawn from torch's global generator; raises UserError without peft."""
    if find_spec("peft") is None:
        raise UserError(
            f"finetune.lora_rank: expected the package peft for {rank}, found none; pip install peft, or set "
            "null"
        )
    from peft import LoraConfig, inject_adapter_in_model  # here: it takes seconds

    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=ADAPTED), encoder)


def merged_weights(cfg: Config, weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Weights of a plain encoder from those of one with adapters; raises CheckpointError where they do not
    fit.
    """
    from peft.tuners.lora import LoraLayer

    assert cfg.finetune.lora_rank is not None
    encoder = build_encoder(cfg)
    add_adapters(encoder, cfg.finetune.lora_rank)
    load_strictly(encoder, weights, where)
    adapted = {name: module for name, module in encoder.named_modules() if isinstance(module, LoraLayer)}
    for name, module in adapted.items():
        module.merge(safe_merge=True)
        parent, _, own = name.rpartition(".")
        setattr(encoder.get_submodule(parent), own, module.get_base_layer())
    return encoder.state_dict()
