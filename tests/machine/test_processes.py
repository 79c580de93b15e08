"""How processes are asked for; runs of several are in test_several_processes.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.errors import InputError
from fdc_jax.heads import LinearHead
from fdc_jax.machine import devices, processes


@pytest.mark.parametrize("where", ["host", "host:1", "host,0/2", "host:1,2/2", "host:1,a/2"])
def test_what_is_no_place_among_processes(where, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **b: pytest.fail("joined"))
    with pytest.raises(InputError, match=f"expected HOST:PORT,0/2 or auto, found {where}$"):
        processes.start(where)


def test_where_jax_finds_no_job_it_says_so(monkeypatch):
    def initialize(*arguments, **options):
        raise ValueError("coordinator_address should be defined.\nSee the manual.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(InputError) as caught:
        processes.start("auto")
    assert "--distributed=auto: JAX found no job" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_agreement_is_asked_for_every_few_calls_and_stays():
    agreement, every = processes.Agreement(), processes.AGREE_EVERY
    assert [agreement(0) for _ in range(every)] == [0] * every
    assert [agreement(15), agreement(0)] == [15, 15]
    late = processes.Agreement()
    assert [late(0), *(late(15) for _ in range(every))] == [0] * every + [15]


def test_replicate_leaves_numpy_arrays_on_the_host_and_every_row_is_the_only_process_own():
    mesh = devices.data_mesh()
    assert devices.own_rows(mesh, 5).tolist() == [True] * 5
    host = np.arange(4.0)
    tree = {"host": host, "head": LinearHead(jnp.ones((2, 3)), np.zeros(2)), "number": 2.0}
    found = devices.replicate(mesh, tree)
    assert found["host"] is host
    assert type(found["head"].bias) is np.ndarray
    for leaf in (found["head"].weight, found["number"]):
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding.mesh == mesh
        assert leaf.is_fully_replicated
