"""Shared by all tests: CPU, quick compilation, one small run, and optional real assets."""

import functools
import gc
import http.server
import importlib.metadata
import os
import threading
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of small decompositions wait for each other on busy machines, a hundred times too long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Programs of tests are tiny: compiling them well takes longer than running them does, and
# compiling them anew in every process and test longer still.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Halve the time of compilation; later versions end at flags that they no longer have.
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", flags)

import jax
import pytest
import threadpoolctl

# Tracing makes many objects and few cycles; to look for cycles at every 700th takes a twentieth of
# the time of all tests.
gc.set_threshold(50_000, 20, 20)

# Plugins of pytest may load NumPy before OpenBLAS is told; threads change the last bits of sums.
threadpoolctl.threadpool_limits(1, user_api="blas")

SHARED_ASSETS = Path(__file__).resolve().parents[2] / "shared" / "assets"


@pytest.fixture
def shared_asset():
    """Returns a function from a name to the path of a real asset; skips where it is absent."""

    def find(name: str) -> Path:
        path = SHARED_ASSETS / name
        if not path.exists():
            pytest.skip(f"needs the real asset {name}, looked for in ../shared/assets")
        return path

    return find


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A folder for what runs share: features of the pretrained encoder, and compiled programs.

    Programs are shared by all workers, and by all calls of pytest with $JAX_COMPILATION_CACHE_DIR.
    """
    base = tmp_path_factory.getbasetemp()
    folder = tmp_path_factory.mktemp("cache")
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    compiled = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or base / "compiled")
    compiled.mkdir(parents=True, exist_ok=True)
    (folder / "compiled").symlink_to(compiled)
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compiled)  # of further processes
    os.environ["FDC_JAX_CACHE"] = str(folder)  # of runs that are opened
    return folder


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, cache):
    """The work directory of a small run that nobody stopped; tests change copies of it."""
    from tests import small_runs

    return small_runs.shared(
        tmp_path_factory, "whole", lambda workdir: small_runs.run(small_runs.config(cache), workdir)
    )


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory, cache):
    """The same run, stopped after its first task."""
    from tests import small_runs

    return small_runs.shared(
        tmp_path_factory,
        "half",
        lambda workdir: small_runs.stopped(small_runs.config(cache), workdir, 18),
    )


@pytest.fixture(scope="session")
def slca_run(tmp_path_factory, cache):
    """A finished run of a learner of all weights; beside it is a copy from its second task."""
    from tests import small_runs

    def make(workdir):
        fields = small_runs.config(cache, learner__name="slca")
        small_runs.stopped(fields, workdir, 23)
        small_runs.copied(workdir, workdir.with_name("slca_stopped"))
        small_runs.run(fields, workdir)

    return small_runs.shared(tmp_path_factory, "slca", make)


@pytest.fixture
def no_figures(monkeypatch):
    """Reports without figures and what they alone show; tests/report has tests of them."""
    monkeypatch.setattr("fdc_jax.report.figures.draw", lambda groups: [])
    monkeypatch.setattr("fdc_jax.report.analysis.OF_THE_FIRST", ())


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files with the checksums that the server was given as headers."""

    def end_headers(self):
        self.server.requests.append(self.command)
        for value in self.server.hashes:
            self.send_header("x-goog-hash", value)
        super().end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def served(tmp_path_factory, monkeypatch):
    """A server on this machine, by its `address`, of the files in `folder`, until it is closed."""
    folder = tmp_path_factory.mktemp("served")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.folder, server.hashes, server.requests = folder, [], []
        server.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.shutdown()
