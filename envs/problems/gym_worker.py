"""The score of one answer to one problem of reasoning-gym. Runs in a worker process and nowhere else (worker.py).

It must import nothing of this package.
"""

import json

import reasoning_gym  # pyright: ignore[reportMissingImports]


def answer(question: dict) -> str:
    """The score, as text, of question["answer"] to problem question["index"] of the dataset that is named."""
    config = json.loads(question["config"])
    dataset = reasoning_gym.create_dataset(question["name"], size=question["size"], seed=question["seed"], **config)
    return repr(float(dataset.score_answer(answer=question["answer"], entry=dataset[question["index"]])))
