"""The encoder, its increments and its training step in PyTorch, to be timed beside ours.

Plain PyTorch with the layout of timm's Vision Transformers, which PyTorch codes of the field build
on. It is written in two ways. `eager` is as those codes have it: one product for query, key and
value, the product of an increment's factors times the tokens beside it, fused attention, exact
GELU, every token through the last block, the batch as a whole. `expert` is what PyTorch can do:
increments are merged into their kernels once a step, with gradients of the factors along the rank;
the class token alone goes through the last block; a processor takes portions that stay in its
caches, as ours does; extraction is compiled with frozen weights. It runs on a GPU where PyTorch
sees one.
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
from torch._inductor import config as inductor  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from benchmarks import measure, synthetic
from fdc_jax.model import layouts, operations, vit
from fdc_jax.run import base

# What PyTorch calls the factors of an increment.
_FACTORS = {"A": "down", "B": "up"}


class LowRank(nn.Module):
    """Adds x A B to a projection of the tokens, or A B to its weight."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        """Returns what is to be added, [n, tokens, width]."""
        return functional.linear(x, self.up.weight @ self.down.weight)


class Merged(torch.autograd.Function):
    """A projection whose last rows hold two increments, of which the factors alone are trained."""

    @staticmethod
    def forward(ctx, x, weight, bias, *factors):
        """Returns x W' + b, with factors A and B of the keys and of the values."""
        ctx.save_for_backward(x, weight, *factors)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        """Returns the gradients of x and of the factors, those along the rank."""
        x, weight, *factors = ctx.saved_tensors
        whole = gradients[0]
        rows, width = x.flatten(0, -2), x.shape[-1]
        found = []
        for part, (down, up) in enumerate((factors[:2], factors[2:])):
            end = whole.shape[-1] - (1 - part) * width
            one = whole[..., end - width : end].flatten(0, -2)
            found += [(one @ up).T @ rows, one.T @ (rows @ down.T)]
        return whole @ weight if ctx.needs_input_grad[0] else None, None, None, *found


class Attention(nn.Module):
    """Multi-head self-attention with optional increments of keys and values."""

    def __init__(self, width: int, heads: int, rank: int, expert: bool):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.key = LowRank(width, rank) if rank else None
        self.value = LowRank(width, rank) if rank else None
        self.expert = expert

    def merge(self):
        """Merges the increments into the weight; once a step."""
        with torch.no_grad():
            parts, layers = [*self.qkv.weight.chunk(3)], [self.key, self.value]
            each: Any
            for at, each in enumerate(layers, 1):
                parts[at] = torch.addmm(parts[at], each.up.weight, each.down.weight)
            self.weight = torch.cat(parts)

    def _project(self, x, first: int):
        if not (self.expert and self.key is not None and self.value is not None):
            return functional.linear(x, self.qkv.weight[first:], self.qkv.bias[first:])
        layers = (self.key.down, self.key.up, self.value.down, self.value.up)
        factors = (each.weight for each in layers)
        return Merged.apply(x, self.weight[first:], self.qkv.bias[first:], *factors)

    def forward(self, x, queries: int | None = None):
        """Returns [n, queries, width], of the first tokens or of all."""
        n, _, width = x.shape

        def split(y):
            return y.unflatten(-1, (-1, self.heads, width // self.heads)).permute(2, 0, 3, 1, 4)

        if queries is None:
            q, k, v = split(self._project(x, 0)).unbind(0)
        else:
            few = functional.linear(x[:, :queries], self.qkv.weight[:width], self.qkv.bias[:width])
            (q,), (k, v) = split(few), split(self._project(x, width))
        if not self.expert and self.key is not None and self.value is not None:
            k, v = k + split(self.key(x))[0], v + split(self.value(x))[0]
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(n, -1, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, variant: vit.Variant, rank: int, expert: bool):
        super().__init__()
        width = variant.width
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, variant.heads, rank, expert)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        layers = {"fc1": nn.Linear(width, variant.mlp_width), "act": nn.GELU()}
        layers["fc2"] = nn.Linear(variant.mlp_width, width)
        self.mlp = nn.Sequential(collections.OrderedDict(layers))

    def forward(self, x, queries: int | None = None):
        """Returns [n, queries, width], of the first tokens or of all."""
        x = x[:, :queries] + self.attn(self.norm1(x), queries)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images to head-input features, with increments unless their rank is 0."""

    def __init__(self, variant: vit.Variant, image_size: int, rank: int, expert: bool):
        super().__init__()
        tokens = (image_size // variant.patch) ** 2 + 1
        patches = nn.Conv2d(3, variant.width, variant.patch, variant.patch)
        self.patch_embed = nn.Sequential(collections.OrderedDict(proj=patches))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, variant.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, variant.width))
        self.blocks = nn.ModuleList([Block(variant, rank, expert) for _ in range(variant.depth)])
        self.norm = nn.LayerNorm(variant.width, eps=1e-6)
        self.queries = 1 if expert else None

    def forward(self, images):
        """Returns the class token after the final norm, [n, width], of bytes [n, s, s, 3]."""
        pixels = images.permute(0, 3, 1, 2).float() / 255.0
        x = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks[:-1]:
            x = block(x)
        return self.norm(self.blocks[-1](x, self.queries)[:, 0])


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


def _encoder(options: argparse.Namespace, expert: bool, device, kernels, problem, increment=None):
    rank = 0 if increment is None else synthetic.RANK
    variant = vit.VARIANTS[options.variant]
    net = VisionTransformer(variant, options.image_size, rank, expert)
    arrays, _ = layouts.as_timm(problem.parameters, variant, kernels, options.image_size)
    for part, factors in (increment or {}).items():
        for (factor, layer), block in itertools.product(_FACTORS.items(), range(variant.depth)):
            arrays[f"blocks.{block}.attn.{part}.{layer}.weight"] = factors[factor][block].T
    net.load_state_dict({path: torch.tensor(array) for path, array in arrays.items()})
    for path, parameter in net.named_parameters():
        parameter.requires_grad_(".down." in path or ".up." in path)
    return net.to(device)


def _portions(options: argparse.Namespace, expert: bool, device) -> int:
    """Returns how many images are taken together."""
    if not expert or device.type == "cuda":
        return options.batch_size
    tokens = (options.image_size // vit.VARIANTS[options.variant].patch) ** 2 + 1
    return max(1, round(operations.PORTION_TOKENS["cpu"] / tokens))


def training_step(options: argparse.Namespace, name: str) -> measure.Contender:
    """Returns a step of Adam on increments and head."""
    device, context = _prepare(options)
    problem, expert = synthetic.problem(options), name == "pytorch_expert"
    net = _encoder(options, expert, device, problem.pretrained, problem, problem.increment)
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

    size = _portions(options, expert, device)

    def repeat():
        optimizer.zero_grad()
        if expert:
            for block in net.blocks:
                block.attn.merge()
        total = 0.0
        for some, of in zip(images.split(size), labels.split(size), strict=True):
            with context():
                loss = functional.cross_entropy(head(net(some)), of, reduction="sum") / len(labels)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return float(total)

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
    problem, expert = synthetic.problem(options), name == "pytorch_expert"
    encode: Any = _encoder(options, expert, device, problem.kernels, problem).eval()
    if expert:
        inductor.freezing = True
        encode = torch.compile(encode)
    size = _portions(options, expert, device)

    def repeat(batches: int = options.batches):
        found = []
        with torch.inference_mode(), context():
            for _ in range(batches):
                images = torch.from_numpy(problem.images).to(device, non_blocking=True)
                encoded = torch.cat([encode(some) for some in images.split(size)])
                found.append(encoded.float().cpu().numpy())
        return found

    return measure.Contender(repeat, {"adapted": repeat(1)[0]}, _about(device))
