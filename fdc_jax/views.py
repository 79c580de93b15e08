"""The two views of a run's images: features of its adapted encoders and of the pretrained one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fdc_jax.data.batches import ByteCache
from fdc_jax.extraction import Extraction, FeatureStream
from fdc_jax.model import vit
from fdc_jax.preparation import Experiment


class TaskFeatures:
    """Features of a task's training images in both views, while they are made and afterwards.

    Called without arguments, it is a source for `calibration.FDC.fit_task`.

    Args:
        stream: of the adapted view, and of the pretrained one unless that is known.
        labels: of the images.
        pretrained: features of E_0 where they are known.
    """

    def __init__(
        self,
        stream: FeatureStream,
        labels: Int[np.ndarray, " n"],
        pretrained: Extraction | None = None,
    ):
        self.stream, self._labels, self._pretrained = stream, labels, pretrained

    def __call__(self) -> Iterator[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
        """Walks over adapted features, pretrained ones or None, and labels."""
        start = 0
        for adapted, *pretrained in self.stream:
            rows = slice(start, start + len(adapted))
            if self._pretrained is not None:
                pretrained = [self._pretrained.features[rows]]
            yield adapted, pretrained[0] if pretrained else None, self._labels[rows]
            start = rows.stop

    def whole(self) -> tuple[Extraction, Extraction | None]:
        """Returns all features of both views; None for a view that is not used."""
        adapted, *pretrained = self.stream.whole()
        return adapted, pretrained[0] if pretrained else self._pretrained


class Views:
    """What one run sees of its images.

    Args:
        experiment: images, encoder, devices.
        decoded: where decoded training images are kept meanwhile.
        poll: called before each batch; raises to stop.
    """

    def __init__(self, experiment: Experiment, decoded: ByteCache, poll: Callable[[], None]):
        self._experiment, self._decoded, self._poll = experiment, decoded, poll

    @property
    def _uses_pretrained(self) -> bool:
        return self._experiment.config.fdc.pretrained_view_weight > 0

    def training(self, task: int, kernels: Any) -> TaskFeatures:
        """Starts the features of a task's training images (line 4), in one pass.

        Args:
            task: from 0.
            kernels: of E_t.
        """
        e = self._experiment
        indices, views, known = e.tasks.train_indices[task], [kernels], None
        if self._uses_pretrained:
            known = e.pretrained_features.find(_name(task), indices)
            if known is None:
                views.append(vit.pretrained_kernels(e.backbone))
        batches = e.evaluation_batches(e.tasks.train, indices, decoded=self._decoded)
        stream = e.extract.stream(e.backbone, views, batches, self._poll)
        return TaskFeatures(stream, e.tasks.train_labels(task), known)

    def keep(self, task: int, pretrained: Extraction | None) -> None:
        """Keeps a task's features of E_0 for other seeds and learners."""
        if pretrained is not None and not pretrained.from_cache:
            e = self._experiment
            e.pretrained_features.keep(_name(task), e.tasks.train_indices[task], pretrained)

    def test(
        self, indices: Int[np.ndarray, " n"], kernels: Any
    ) -> tuple[Extraction, Float[np.ndarray, "n d"] | None]:
        """Returns features of the leading test images (line 14) in both views.

        Args:
            indices: the first of the stream's test images.
            kernels: of E_T.
        """
        e = self._experiment

        def extract(kernels: Any, indices: np.ndarray) -> Extraction:
            batches = e.evaluation_batches(e.tasks.test, indices, e.test_images)
            return e.extract(e.backbone, kernels, batches, self._poll)

        adapted, every = extract(kernels, indices), e.tasks.test_indices
        if not self._uses_pretrained:
            return adapted, None
        pretrained = e.pretrained_features.get(
            "test", every, lambda: extract(vit.pretrained_kernels(e.backbone), every)
        )
        return adapted, pretrained.features[: len(indices)]


def _name(task: int) -> str:
    return f"train_{task:03d}"
