"""The benchmarks run that compare forms of the code itself, orders of a window and revisions, and steps with plans."""

import json

import pytest

from benchmarks import predicted_step, revisions, window_order


def test_orders_of_a_window(tmp_path, capsys, one_thread):
    output = tmp_path / "order.json"
    window_order.main(["--quick", "--output", str(output)])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(output.read_text())
    assert record["layers_over_chunks"]["16"]["median"] > 0
    assert 0 < record["gradient_errors"]["2"]["layers"]["MLP"] < 0.02


def test_gradients_layer_by_layer_are_rounded_once():
    """In BF16 with 16 chunks: the errors of one product, where chunk by chunk adds 16 of them up."""
    errors = window_order.rounding(window_order.model_of(2, 32, 16), 16)
    for kind in ("MLP", "head"):
        assert errors["layers"][kind] < 0.9 * errors["chunks"][kind]


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_revision_is_compared_model_by_model(by_layer):
    """With itself: as fast within what turns of a few tokens differ by, and as large."""
    found = revisions.compare(revisions.ROOT, "retnet", tokens=128, chunk_size=64, turns=2, by_layer=by_layer)
    assert 0.2 < found["times_faster"]["median"] < 5
    assert found["mib"]["old"] == pytest.approx(found["mib"]["new"], rel=0.3)


def test_a_side_that_ends_is_an_error():
    with (
        revisions.Side(revisions.ROOT, {"mixer": "no such mixer"}, 128) as side,
        pytest.raises(RuntimeError, match="side ended"),
    ):
        side.turn()


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_step_of_two_ranks_is_predicted(tmp_path, capsys):
    """What two real ranks measure goes into a plan; on a busy machine nothing is said of how near it comes."""
    predicted_step.main(["--only", "local attention, TP 2", "--steps", "1", "--output", str(tmp_path / "step.json")])
    (case,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert case["measured"] > 0
    assert case["latency"] > 0
    parts = case["parts"]
    # 18 sums of each of 16 chunks: 4 of each of 4 layers, the embedding's and the head's; plans take both ranks' mean
    assert parts["tensor"] > 18 * 16 * case["latency"] / 10
    assert case["predicted"] == pytest.approx(parts["total"])
