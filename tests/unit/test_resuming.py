"""What a run takes over from the checkpoint that it goes on from, besides its tensors."""

from types import SimpleNamespace

from megamem.training import checkpointing
from megamem.training.callbacks.bad_steps import BadSteps
from tests.saved_run import saved_run


def test_steps_tokens_and_skipped_steps_go_on(monkeypatch):
    """Else a run that diverges could be started again for ever: bad steps in a row would be counted anew."""
    saved = saved_run(7, bad_steps={"total": 3, "streak": [6, 7], "spikes": 1})
    monkeypatch.setattr(checkpointing, "load_training_state", lambda engine, checkpoint, group: saved)
    told, bad_steps = [], BadSteps(limit=4)
    trainer = SimpleNamespace(engine=None, go_on=lambda step, tokens: told.append((step, tokens)))
    checkpointing.resume(trainer, None, bad_steps, None)
    assert told == [(7, 64 * 7)]
    assert bad_steps.counts() == {"total": 3, "streak": [6, 7], "spikes": 1}
