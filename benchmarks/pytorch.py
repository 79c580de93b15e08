"""The encoder, its increments and its training step in PyTorch, to be timed beside ours.

Plain PyTorch with the layout of timm's Vision Transformers, which PyTorch codes of the field build
on: one product for query, key and value, fused attention, exact GELU, every token through the last
block. Increments act in either of two ways: `product`, as those codes have it, multiplies the
factors and the tokens by the result; `factors` multiplies the tokens by one factor after the other.
It runs on a GPU where PyTorch sees one.
"""

import argparse
import collections
import contextlib
import itertools
import os
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from benchmarks import measure, synthetic
from fdc_jax.model import layouts, vit
from fdc_jax.run import base

# What PyTorch calls the factors of an increment.
_FACTORS = {"A": "down", "B": "up"}


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
        layers = {"fc1": nn.Linear(width, variant.mlp_width), "act": nn.GELU()}
        layers["fc2"] = nn.Linear(variant.mlp_width, width)
        self.mlp = nn.Sequential(collections.OrderedDict(layers))

    def forward(self, x):
        """Returns [n, tokens, width]."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images to head-input features.

    Args:
        variant: sizes of the encoder.
        image_size: side of the images.
        rank: of the increments; 0: none.
        form: `product` or `factors`.
    """

    def __init__(self, variant: vit.Variant, image_size: int, rank: int = 0, form="product"):
        super().__init__()
        tokens = (image_size // variant.patch) ** 2 + 1
        patches = nn.Conv2d(3, variant.width, variant.patch, variant.patch)
        self.patch_embed = nn.Sequential(collections.OrderedDict(proj=patches))
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


def _prepare(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the device and what runs in the precision that is asked for."""
    # JAX converts weights alone here: the accelerator is PyTorch's.
    jax.config.update("jax_platforms", "cpu")
    options.attention = "xla"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.cores:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    fast = options.precision == "fast"

    def context():
        if not fast:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    return device, context


def _about(device: Any) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"device": f"1 x {name}", "torch": torch.__version__}


def _encoder(options: argparse.Namespace, name: str, device, kernels, problem, increment=None):
    form = "factors" if name == "pytorch_factors" else "product"
    rank = 0 if increment is None else synthetic.RANK
    variant = vit.VARIANTS[options.variant]
    net = VisionTransformer(variant, options.image_size, rank, form)
    arrays, _ = layouts.as_timm(problem.parameters, variant, kernels, options.image_size)
    for part, factors in (increment or {}).items():
        for (factor, layer), block in itertools.product(_FACTORS.items(), range(variant.depth)):
            arrays[f"blocks.{block}.attn.{part}.{layer}.weight"] = factors[factor][block].T
    net.load_state_dict({path: torch.tensor(array) for path, array in arrays.items()})
    for path, parameter in net.named_parameters():
        parameter.requires_grad_(".down." in path or ".up." in path)
    net.to(device)
    return net, torch.compile(net) if name == "pytorch_compiled" else net


def training_step(options: argparse.Namespace, name: str) -> measure.Contender:
    """Returns a step of Adam on increments and head."""
    device, context = _prepare(options)
    problem = synthetic.problem(options)
    net, encode = _encoder(options, name, device, problem.pretrained, problem, problem.increment)
    head = torch.nn.Linear(problem.model.variant.width, synthetic.CLASSES)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(problem.head.weight))
        head.bias.zero_()
    head.to(device)
    rates: Any = base.get_config().train
    ours = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": ours, "lr": rates.increment_learning_rate}]
    groups.append({"params": [*head.parameters()], "lr": rates.head_learning_rate})
    optimizer = torch.optim.Adam(groups)
    images = torch.from_numpy(problem.images).to(device)
    labels = torch.from_numpy(problem.labels).long().to(device)

    def repeat():
        with context():
            loss = functional.cross_entropy(head(encode(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    first = repeat()

    def gradient(part, factor):
        layers = [net.get_submodule(f"{block}.attn.{part}.{_FACTORS[factor]}") for block in blocks]
        return torch.stack([each.weight.grad.T for each in layers]).float().cpu().numpy()

    blocks = [f"blocks.{block}" for block in range(len(net.blocks))]
    outputs = {"A": gradient("key", "A"), "B": gradient("value", "B")}
    outputs["loss"] = np.array([first, repeat()])

    def synchronised():
        repeat()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return measure.Contender(synchronised, outputs, _about(device))


def extraction(options: argparse.Namespace, name: str) -> measure.Contender:
    """Returns the features of one view."""
    device, context = _prepare(options)
    problem = synthetic.problem(options)
    _, encode = _encoder(options, name, device, problem.kernels, problem)

    def repeat(batches: int = options.batches):
        found = []
        with torch.inference_mode(), context():
            for _ in range(batches):
                images = torch.from_numpy(problem.images).to(device, non_blocking=True)
                found.append(encode(images).float().cpu().numpy())
        return found

    return measure.Contender(repeat, {"adapted": repeat(1)[0]}, _about(device))
