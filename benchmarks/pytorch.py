"""A training step in PyTorch for comparison, on a GPU if PyTorch has one.

The model is plain PyTorch with the layout of timm's Vision Transformers, in two forms. The field's
usual form has float32, one product for query, key and value, a separate product with an increment's
factors, fused attention, exact GELU, and every token in the last block. The expert's form has
bfloat16 by autocast and `torch.compile`; it merges increments into kernels once per step, computes
gradients of the factors along the rank, and sends the class token alone through the last block.
"""

import collections
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import flops, measure, speed, synthetic
from fdc_jax.model import layouts, vit
from fdc_jax.run.config import Config

try:
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]
    from torch.nn import functional  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise measure.Skipped("PyTorch is not installed") from error


class LowRank(nn.Module):
    """An increment of a projection: adds x A B to its output, or A B to its weight."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.A = nn.Linear(width, rank, bias=False)
        self.B = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        """Returns the increment of the output, [n, tokens, width]."""
        return functional.linear(x, self.B.weight @ self.A.weight)


class Merged(torch.autograd.Function):
    """A frozen projection with increments of keys and values, whose factors are trained."""

    @staticmethod
    def forward(ctx, x, weight, bias, *factors):
        """Returns x W' + b, with factors A and B of the keys and of the values."""
        ctx.save_for_backward(x, weight, *factors)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        """Returns the gradients of x and of the factors; products go along the rank."""
        x, weight, *factors = ctx.saved_tensors
        upstream = gradients[0]
        rows, width = x.flatten(0, -2), x.shape[-1]
        of_factors = []
        # Under autocast tokens are bfloat16, weights float32.
        factors = [factor.to(upstream.dtype) for factor in factors]
        for index, (A, B) in enumerate((factors[:2], factors[2:])):
            end = upstream.shape[-1] - (1 - index) * width
            part = upstream[..., end - width : end].flatten(0, -2)
            of_factors += [((part @ B).T @ rows).float(), (part.T @ (rows @ A.T)).float()]
        weight = weight.to(upstream.dtype)
        return upstream @ weight if ctx.needs_input_grad[0] else None, None, None, *of_factors


class Attention(nn.Module):
    """Multi-head self-attention with increments of keys and values."""

    def __init__(self, width: int, heads: int, rank: int, expert: bool):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.key, self.value = LowRank(width, rank), LowRank(width, rank)
        self.expert = expert

    def merge(self):
        """Merges the increments into the weight; call it once per step."""
        with torch.no_grad():
            query, key, value = self.qkv.weight.chunk(3)
            key = torch.addmm(key, self.key.B.weight, self.key.A.weight)
            value = torch.addmm(value, self.value.B.weight, self.value.A.weight)
            self.weight = torch.cat([query, key, value])

    def _project(self, x, first: int):
        if not self.expert:
            return functional.linear(x, self.qkv.weight[first:], self.qkv.bias[first:])
        layers = (self.key.A, self.key.B, self.value.A, self.value.B)
        factors = (layer.weight for layer in layers)
        return Merged.apply(x, self.weight[first:], self.qkv.bias[first:], *factors)

    def forward(self, x, queries: int | None = None):
        """Returns the outputs of the first `queries` tokens, or of all, [n, queries, width]."""
        n, _, width = x.shape

        def split(y):
            return y.unflatten(-1, (-1, self.heads, width // self.heads)).permute(2, 0, 3, 1, 4)

        if queries is None:
            q, k, v = split(self._project(x, 0)).unbind(0)
        else:
            weight, bias = self.qkv.weight[:width], self.qkv.bias[:width]
            query = functional.linear(x[:, :queries], weight, bias)
            (q,), (k, v) = split(query), split(self._project(x, width))
        if not self.expert:
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
        """Returns the outputs of the first `queries` tokens, or of all, [n, queries, width]."""
        x = x[:, :queries] + self.attn(self.norm1(x), queries)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Encoder from images to head-input features, with increments."""

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


def _encoder(options: Any, expert: bool, device: Any, problem: synthetic.Problem) -> Any:
    """Returns the encoder on a device, with only its increments trainable."""
    variant, size = problem.model.variant, options.image_size
    net = VisionTransformer(variant, size, synthetic.RANK, expert)
    arrays, _ = layouts.as_timm(problem.parameters, variant, problem.pretrained, size)
    increment: Any = problem.increment
    for part, factors in increment.items():
        for factor, block in itertools.product("AB", range(variant.depth)):
            arrays[f"blocks.{block}.attn.{part}.{factor}.weight"] = factors[factor][block].T
    net.load_state_dict({path: torch.tensor(array) for path, array in arrays.items()})
    for path, parameter in net.named_parameters():
        parameter.requires_grad_(".A." in path or ".B." in path)
    return net.to(device)


def training_step(options: Any, expert: bool) -> Iterator[Any]:
    """Yields the row of an Adam step on increments and head, and comparisons with our step."""
    # PyTorch has the accelerator; JAX only converts weights.
    jax.config.update("jax_platforms", "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision, size = "fast" if expert else "parity", options.batch_size
    problem = synthetic.problem(
        synthetic.encoder(options, "parity", "xla"), options.image_size, size
    )
    net = _encoder(options, expert, device, problem)
    head: Any = torch.nn.Linear(problem.model.variant.width, synthetic.CLASSES)
    head.load_state_dict({k: torch.from_numpy(v) for k, v in problem.head._asdict().items()})
    head.to(device)
    rates = Config().train
    ours = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": ours, "lr": rates.increment_learning_rate}]
    groups.append({"params": [*head.parameters()], "lr": rates.head_learning_rate})
    optimizer = torch.optim.Adam(groups)
    images = torch.from_numpy(problem.batch.images).to(device)
    labels = torch.from_numpy(problem.batch.labels).long().to(device)
    encode: Any = torch.compile(net) if expert else net

    def call() -> Any:
        optimizer.zero_grad()
        if expert:
            for block in net.blocks:
                block.attn.merge()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=expert):
            loss = functional.cross_entropy(head(encode(images)), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    start = time.perf_counter()
    numbers = {"loss": float(call())}
    compiled = time.perf_counter() - start
    blocks = [block.attn for block in net.blocks]
    for part, factor in (("key", "A"), ("value", "B")):
        layers = [getattr(getattr(block, part), factor) for block in blocks]
        norm = torch.stack([layer.weight.grad.float() for layer in layers]).norm()
        numbers[f"gradient of {part} {factor}"] = float(norm)
    numbers["second loss"] = float(call())
    name = "PyTorch, compiled, bfloat16" if expert else "PyTorch as the field writes it, float32"
    yield from speed.agreement(options, name, precision, numbers)
    seconds = measure.paced(options, call, wait)
    count = flops.training_step(problem.model.variant, options.image_size, synthetic.RANK, size)
    row = speed.row(f"{name}, batch {size}", seconds, size, count)
    if device.type == "cuda":
        row["teraflops"] = 1e-12 * count / seconds["clock"]
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["device"] = torch.cuda.get_device_name()
    yield row | {"compile_seconds": compiled, "torch": torch.__version__}
