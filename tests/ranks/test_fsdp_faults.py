"""A rank of a sharded model that raises or sleeps: the others get an OutOfStepError."""

import pytest

import fsdp_faults
import processes

SECONDS = 5  # until a rank gives up


@pytest.mark.full
@pytest.mark.parametrize("scope", ["rank", "world"])
@pytest.mark.parametrize("fault", ["raise", "sleep"])
@pytest.mark.parametrize("place", ["loss", "backward"])
def test_the_other_rank_is_told_what_happened(tmp_path, scope, fault, place):
    """In a later step, when ranks no longer wait for each other before every message."""
    found = processes.run(fsdp_faults.go, 2, tmp_path, scope, fault, place, 2, seconds=SECONDS)
    kind, message = found[0]
    assert kind == "OutOfStepError", message
    assert "could not exchange gradients with the others in step 2" in message
    assert found[1][0] == ("ValueError" if fault == "raise" else "OutOfStepError")


def test_an_error_of_the_model_stays_what_it_is():
    from microclip.distributed.ranks import TRANSPORT

    assert TRANSPORT.search("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert not TRANSPORT.search("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")
    assert not TRANSPORT.search("CUDA out of memory")
