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
from tests.training.trainer_ranks import BATCH, Detached, Plain, inputs

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("trainers")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2",
                   "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [subprocess.Popen([sys.executable, "-m", "tests.training.trainer_ranks", str(folder)], cwd=ROOT,
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


def test_a_tp_group_draws_the_same_numbers(found):
    assert found[0]["tp_group_masks"] == found[1]["tp_group_masks"]


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


def test_autocast_around_a_step_is_refused_unless_the_model_was_traced_with_it(found):
    for rank in found:
        step, evaluation, loss = rank["autocast_later"]
        assert "torch.autocast is on around step (cpu bfloat16), but it was off when weft.parallelize traced" in step
        assert "torch.autocast is on around eval_loss" in evaluation
        assert loss == pytest.approx(Plain()(inputs()).item(), rel=1e-5)


def test_a_pipeline_traced_under_autocast_trains_as_plain_autocast_does(found):
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for seed in (0, 1):
        optimizer.zero_grad()
        for part in inputs(seed).split(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(part) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    for rank in found:
        assert rank["autocast_traced"]["losses"] == pytest.approx([sum(losses[:4]), sum(losses[4:])], rel=1e-6)
        assert "around step (cpu float16), but it was cpu bfloat16" in rank["autocast_traced"]["other"]
        for name, value in rank["autocast_traced"]["weights"].items():
            assert value == pytest.approx(model.get_parameter(name).flatten().tolist(), rel=1e-5, abs=1e-6), name


def test_a_tensor_of_another_dtype_than_planned_is_not_sent(found):
    assert "of stage 's0' is torch.bfloat16 of (2, 32), but torch.float32 of (2, 32) was planned" in found[0]["changed_dtype"]


def test_ranks_that_pass_different_batches_are_told_so_on_all_ranks(found):
    for rank in found:
        different, shuffled, shape, methods, loss = rank["different_batches"]
        for text in (different, shuffled):
            assert "the ranks were given different batches" in text
            assert "rank 1 had another than rank 0" in text
            assert "no DistributedSampler" in text
        assert "'x' in the batch is torch.float32 of (7, 32), but the plan is for torch.float32 of (8, 32)" in shape
        assert "rank 0 is at eval_loss, call 4, rank 1 at step, call 4" in methods
        assert loss == pytest.approx(Plain()(inputs()).item(), rel=1e-5)


def test_an_error_of_the_users_optimizer_on_one_rank_ends_all_of_them_with_its_cause(found):
    for number, rank in enumerate(found):
        for position, (failing, doing) in enumerate(((0, "looking at the arguments"), (1, "looking at the arguments"),
                                                     (1, "preparing its part of the model"))):
            cause = f"ValueError: no learning rate on rank {failing}"
            told = cause if number == failing else f"RunError: rank {failing} failed while {doing}: {cause}"
            assert rank["failing_optimizers"][position] == told


def test_an_optimizer_whose_later_step_fails_on_one_rank_ends_all_of_them_with_its_cause(found):
    cause = "ValueError: the second step failed"
    assert found[0]["failing_steps"] == [f"RunError: rank 1 failed while taking its optimizer's step: {cause}"]
    assert found[1]["failing_steps"] == [cause]


def test_ranks_that_call_different_methods_are_told_so_at_once(found):
    for rank in found:
        first, saving, closing, sparse, empty = rank["other_methods"]
        assert "rank 0 is at step, call 1, rank 1 at eval_loss, call 1" in first
        assert "rank 0 is at save_checkpoint after 0 calls, rank 1 at step, call 1" in saving
        assert "rank 0 is at state_dict after 0 calls, rank 1 at close after 0 calls" in closing
        assert "'x' in the batch is a tensor of the layout sparse_coo" in sparse
        assert "'x' in the batch is a tensor without values, on the meta device" in empty


def test_a_loss_that_is_a_sum_is_refused_where_the_batch_is_cut(found):
    expected = Plain(total=True)(inputs()).item()
    for rank in found:
        *refused, loss = rank["summed_losses"]
        for text in refused:
            assert "ModelError: the plan cuts the batch, but the model's loss is not a mean over samples" in text
            assert "one micro-batch on one replica" in text
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_model_that_takes_another_way_while_it_is_traced_is_refused_on_all_ranks(found):
    """It trained as it was traced, without a word."""
    for rank in found:
        assert rank["traced_otherwise"].startswith("ModelError: the traced graph computes something else than the module")
        assert f"the module's loss is {Plain()(inputs()).item():.6g} and the graph's" in rank["traced_otherwise"]
        assert "asks whether it is traced (in trainer_ranks.py:" in rank["traced_otherwise"]
    assert found[1]["traced_otherwise"].endswith("(on rank 0)")
