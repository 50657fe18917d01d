"""Floating-point operations of the models, counted from their shapes: two per multiply-add of a matrix
product; norms, activations and softmax are left out.

A backward pass costs twice the forward pass, except where nothing needs the gradient of the input (the
patch embedding). What a kernel computes again is not counted.
"""

from __future__ import annotations

from torch import nn

from models.predictor import LinearPredictor, MlpPredictor, Predictor3D
from models.vit3d import Block, VisionTransformer3D
from models.vjepa3d import VJEPA3D


def block_flops(block: Block, tokens: int) -> int:
    """Forward pass of one transformer block on one sample of so many tokens."""
    matrices = (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2)
    products = sum(2 * tokens * layer.weight.numel() for layer in matrices)
    return products + 4 * tokens * tokens * block.attn.proj.in_features


def encoder_flops(encoder: VisionTransformer3D, tokens: int, *, backward: bool = False) -> int:
    """One sample through the encoder with so many tokens kept; `backward` adds the backward pass."""
    embedding = 2 * tokens * encoder.patch_embed.proj.weight.numel()
    blocks = sum(block_flops(block, tokens + encoder.num_prefix) for block in _blocks(encoder))
    return 2 * embedding + 3 * blocks if backward else embedding + blocks


def predictor_flops(
    predictor: Predictor3D | MlpPredictor | LinearPredictor, context: int, target: int
) -> int:
    """Forward pass of one sample."""
    if isinstance(predictor, LinearPredictor):
        return 2 * target * predictor.fc.weight.numel()
    if isinstance(predictor, MlpPredictor):
        return 2 * target * (predictor.fc1.weight.numel() + predictor.fc2.weight.numel())
    blocks = sum(block_flops(block, context + target) for block in _blocks(predictor))
    ends = (
        context * predictor.predictor_embed.weight.numel() + target * predictor.predictor_proj.weight.numel()
    )
    return blocks + 2 * ends


def step_flops(model: VJEPA3D, context: int, target: int) -> int:
    """One sample's share of a training step: context encoder and predictor forward and backward, target
    encoder forward (none of fixed targets). A dense context is all tokens.
    """
    tokens = model.encoder.num_tokens
    seen = tokens if model.is_dense else context
    total = encoder_flops(model.encoder, seen, backward=True)
    total += 3 * predictor_flops(model.predictor, context, target)
    if model.neighbour_head is not None:
        total += 3 * 2 * context * model.neighbour_head.weight.numel()
    if model.random_targets is not None:
        total += 2 * tokens * model.random_targets.weight.numel()
    return total + (encoder_flops(model.target_encoder, tokens) if model.reads_target_view else 0)


def recomputed_flops(model: VJEPA3D, context: int, target: int) -> int:
    """One sample's share of what activation checkpointing computes again: the blocks' forward pass without
    its last product, whose result the backward pass does not need.
    """
    return sum(
        block_flops(block, tokens) - 2 * tokens * block.mlp.fc2.weight.numel()
        for block, tokens in _trained_blocks(model, context, target)
    )


def flash_backward_flops(model: VJEPA3D, context: int, target: int) -> int:
    """One sample's share of flash attention's extra: seven products backward (pallas_flash.py), not four."""
    return sum(
        3 * 2 * tokens * tokens * block.attn.proj.in_features
        for block, tokens in _trained_blocks(model, context, target)
    )


def _trained_blocks(model: VJEPA3D, context: int, target: int) -> list[tuple[Block, int]]:
    """Every block that a gradient passes, with the number of its tokens."""
    seen = model.encoder.num_tokens if model.is_dense else context
    blocks = [(block, seen + model.encoder.num_prefix) for block in _blocks(model.encoder)]
    return blocks + [(block, context + target) for block in _blocks(model.predictor)]


def _blocks(module: nn.Module) -> list[Block]:
    return [part for part in module.modules() if isinstance(part, Block)]
