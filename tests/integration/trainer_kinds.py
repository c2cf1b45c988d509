"""One of the small trainings under the whole trainer; ``SIGNAL`` comes at step ``AT``, once a save has committed."""

import os

from state_trainings import trainings

from overnight import trainer

with trainer.run(defaults={"kind": "SGD"}, every=None, seed=3) as run:
    training = trainings()[run.params["kind"]]()
    run.track(**training.objects)
    for step in run.steps(12):
        training.step()
        if step in (3, 7):
            save = run.save()
        if str(step) == os.environ.get("AT"):
            save.result()
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
