"""What two ranks that train together must have in common, and what not; the ranks are in ``trainer_ranks.py``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.run.pool import ROOT
from tests.run.trainer_ranks import BATCH, Detached, inputs

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("trainers")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2",
                   "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [subprocess.Popen([sys.executable, "-m", "tests.run.trainer_ranks", str(folder)], cwd=ROOT,
                                env={**environment, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [process.wait(100) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_a_checkpoint_has_the_buffers_of_the_rank_that_changes_them(found):
    assert found[0]["saved_statistics"]["batches"] == 4
    assert found[0]["saved_statistics"]["mean"] > 0


def test_replicas_have_the_same_statistics_after_a_step(found):
    assert found[0]["shared_statistics"] == found[1]["shared_statistics"]
    assert any(found[0]["shared_statistics"])


def test_replicas_draw_different_numbers_whatever_the_script_draws(found):
    first, second, third, *again = found[0]["masks"]
    assert found[0]["masks"] == found[1]["masks"], "gradients are summed"
    assert any(count % 2 for count in first), "two replicas that drew alike would have kept each an even number of times"
    assert all(0 <= count <= BATCH for count in first)
    assert first != second
    assert second != third
    assert again == [second, third], "a resumed run draws what it would have drawn"


def test_a_team_draws_the_same_numbers(found):
    assert found[0]["team_masks"] == found[1]["team_masks"]


def test_weights_without_gradient_stay_and_complex_ones_learn(found):
    model = Detached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    model(inputs()).backward()
    optimizer.step()
    for rank in found:
        for name, tensor in model.named_parameters():
            value = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            assert rank["decayed"][name] == pytest.approx(value.flatten().tolist(), rel=1e-4, abs=1e-6), name


def test_optimizers_that_need_whole_parameters_see_divided_states(found):
    for rank in found:
        assert "Adafactor needs whole parameters, but this plan divides" in rank["whole_needed"]


def test_models_that_differ_in_one_number_are_refused_on_all_ranks(found):
    for rank in found:
        assert "the ranks have built different models: 'second.weight' is not the same" in rank["different_models"]
