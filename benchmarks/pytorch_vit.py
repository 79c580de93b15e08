"""The encoder, its increments and its training step in PyTorch, to be timed beside ours.

Plain PyTorch with the layout of timm's Vision Transformers, which PyTorch codes of the field build
on: one product for query, key and value, fused attention, exact GELU, every token through the last
block. Increments act in either of two ways: `product`, as those codes have it, multiplies the
factors and the tokens by the result; `factors` multiplies the tokens by one factor after the other.
"""

from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from fdc_jax.model import vit

INCREMENTS = ("product", "factors")


class LowRank(nn.Module):
    """Adds (x A) B to a projection of the tokens."""

    def __init__(self, width: int, rank: int, form: str):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.form = form

    def forward(self, x):
        """Returns what is to be added, [n, tokens, width]."""
        if self.form == "product":
            return functional.linear(x, self.up.weight @ self.down.weight)
        return self.up(self.down(x))


class Attention(nn.Module):
    """Multi-head self-attention with optional increments of keys and values."""

    def __init__(self, width: int, heads: int, rank: int, form: str):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.key = LowRank(width, rank, form) if rank else None
        self.value = LowRank(width, rank, form) if rank else None

    def forward(self, x):
        """Returns [n, tokens, width]."""
        n, tokens, width = x.shape

        def split(y):
            return y.reshape(n, tokens, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = self.qkv(x).reshape(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.key is not None and self.value is not None:
            k, v = k + split(self.key(x)), v + split(self.value(x))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(n, tokens, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, variant: vit.Variant, rank: int, form: str):
        super().__init__()
        width = variant.width
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, variant.heads, rank, form)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, variant.mlp_width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(variant.mlp_width, width)

    def forward(self, x):
        """Returns [n, tokens, width]."""
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Images to head-input features.

    Args:
        variant: sizes of the encoder.
        image_size: side of the images.
        rank: of the increments; 0: none.
        form: one of `INCREMENTS`.
    """

    def __init__(self, variant: vit.Variant, image_size: int, rank: int = 0, form="product"):
        super().__init__()
        tokens = (image_size // variant.patch) ** 2 + 1
        self.patch_embed = nn.Conv2d(3, variant.width, variant.patch, variant.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, variant.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, variant.width))
        self.blocks = nn.ModuleList([Block(variant, rank, form) for _ in range(variant.depth)])
        self.norm = nn.LayerNorm(variant.width, eps=1e-6)

    def forward(self, images):
        """Returns the class token after the final norm, [n, width], of bytes [n, s, s, 3]."""
        pixels = images.permute(0, 3, 1, 2).float() / 255.0
        x = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float32))


def converted(params: Any, kernels: vit.KeyValueKernels, increment: vit.Increment | None = None):
    """Returns the names and tensors of a PyTorch encoder that is the JAX one.

    Args:
        params: pretrained parameters.
        kernels: key and value kernels.
        increment: that the encoder has apart from its kernels.
    """
    trunk = params["Transformer"]
    width = np.shape(params["cls"])[-1]

    def norm(name, leaves):
        return {f"{name}.weight": leaves["scale"], f"{name}.bias": leaves["bias"]}

    def dense(name, leaves):
        kernel = np.reshape(leaves["kernel"], (-1, np.shape(leaves["kernel"])[-1]))
        return {f"{name}.weight": kernel.T, f"{name}.bias": leaves["bias"]}

    state = {
        "cls_token": params["cls"],
        "pos_embed": trunk["posembed_input"]["pos_embedding"],
        "patch_embed.weight": np.transpose(params["embedding"]["kernel"], (3, 2, 0, 1)),
        "patch_embed.bias": params["embedding"]["bias"],
        **norm("norm", trunk["encoder_norm"]),
    }
    factors: dict[str, Any] = dict(increment or {})
    for number in range(len(kernels["key"])):
        block, name = trunk[f"encoderblock_{number}"], f"blocks.{number}"
        attention = block["MultiHeadDotProductAttention_1"]
        query = np.reshape(attention["query"]["kernel"], (width, width))
        fused = [query, kernels["key"][number], kernels["value"][number]]
        bias = [np.reshape(attention[part]["bias"], -1) for part in ("query", "key", "value")]
        state |= {
            f"{name}.attn.qkv.weight": np.concatenate(fused, axis=1).T,
            f"{name}.attn.qkv.bias": np.concatenate(bias),
            **dense(f"{name}.attn.proj", attention["out"]),
            **norm(f"{name}.norm1", block["LayerNorm_0"]),
            **norm(f"{name}.norm2", block["LayerNorm_2"]),
            **dense(f"{name}.fc1", block["MlpBlock_3"]["Dense_0"]),
            **dense(f"{name}.fc2", block["MlpBlock_3"]["Dense_1"]),
        }
        for part, each in factors.items():
            state[f"{name}.attn.{part}.down.weight"] = each["A"][number].T
            state[f"{name}.attn.{part}.up.weight"] = each["B"][number].T
    return jax.tree.map(_tensor, state)
