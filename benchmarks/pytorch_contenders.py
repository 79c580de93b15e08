"""What the programs time of PyTorch, on its GPU where it sees one."""

import argparse
import contextlib
import os
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from benchmarks import measure, pytorch_vit, synthetic
from fdc_jax.model import vit


def _prepare(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the device and what runs in the precision that is asked for."""
    # JAX converts weights alone here: the accelerator is PyTorch's.
    jax.config.update("jax_platforms", "cpu")
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


def _encoder(options: argparse.Namespace, device, kernels, problem, increment=None):
    form = "factors" if options.contender == "pytorch_factors" else "product"
    rank = 0 if increment is None else synthetic.RANK
    variant = vit.VARIANTS[options.variant]
    net = pytorch_vit.VisionTransformer(variant, options.image_size, rank, form)
    net.load_state_dict(pytorch_vit.converted(problem.parameters, kernels, increment))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(".down." in name or ".up." in name)
    return net.to(device)


def _callable(options: argparse.Namespace, net):
    return torch.compile(net) if options.contender == "pytorch_compiled" else net


def training_step(options: argparse.Namespace, rates: dict[str, float]) -> measure.Contender:
    """Returns a step of Adam on increments and head."""
    device, context = _prepare(options)
    problem = synthetic.problem(
        options.variant, options.image_size, options.batch_size, options.precision
    )
    net = _encoder(options, device, problem.pretrained, problem, problem.increment)
    encode = _callable(options, net)
    head = torch.nn.Linear(problem.model.variant.width, synthetic.CLASSES)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(problem.head.weight))
        head.bias.zero_()
    head.to(device)
    optimizer = torch.optim.Adam(
        [
            {"params": [p for p in net.parameters() if p.requires_grad], "lr": rates["increment"]},
            {"params": head.parameters(), "lr": rates["head"]},
        ]
    )
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
        blocks = [getattr(getattr(block.attn, part), factor) for block in net.blocks]
        return torch.stack([each.weight.grad.T for each in blocks]).float().cpu().numpy()

    outputs = {"A": gradient("key", "down"), "B": gradient("value", "up")}
    outputs["loss"] = np.array([first, repeat()])

    def synchronised():
        repeat()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return measure.Contender(synchronised, outputs, _about(device))


def extraction(options: argparse.Namespace) -> measure.Contender:
    """Returns the features of one view."""
    device, context = _prepare(options)
    problem = synthetic.problem(
        options.variant, options.image_size, options.batch_size, options.precision
    )
    encode = _callable(options, _encoder(options, device, problem.kernels, problem))

    def repeat(batches: int = options.batches):
        found = []
        with torch.inference_mode(), context():
            for _ in range(batches):
                images = torch.from_numpy(problem.images).to(device, non_blocking=True)
                found.append(encode(images).float().cpu().numpy())
        return found

    return measure.Contender(repeat, {"adapted": repeat(1)[0]}, _about(device))
