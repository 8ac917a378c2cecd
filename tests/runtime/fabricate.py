"""A run directory as a run would leave it, made up: for the tests of the report and to look at it.

python tests/runtime/fabricate.py FOLDER
"""

import math
import random
import sys
from pathlib import Path

from jaxrl.runtime.log import MetricsLog
from jaxrl.runtime.record import episode_records, rollout_file, write_records
from jaxrl.runtime.run_dir import RunDir, open_run_dir
from jaxrl.types import Sample, StopReason, Trajectory, TrajectoryGroup, Transition

HOSTILE = "<script>alert(1)</script> [/bold] [red]x[/red] \x1b[31m\u202e &amp; \x00</pre>"


def fabricate(folder: Path, *, steps: int = 60) -> RunDir:
    """Write configuration, metrics and rollouts of a made-up training of the guessing game."""
    config = {"model": "tiny", "env": "guess_number", "lr": 3e-3, "loss": {"name": "grpo", "kl": 0.0}, "seed": 0}
    run = open_run_dir(folder, "delete", config=config)
    rng = random.Random(0)
    with MetricsLog(run.metrics) as log:
        for step in range(steps):
            log.write(step, metrics(step, steps, rng))
    for step in range(0, steps, 10):
        groups = [group(step / steps, rng) for _ in range(3)]
        tasks = [f"guess 1-{high}" for high in (8, 16, 32)]
        write_records(rollout_file(run.rollouts, step), episode_records(groups, decode, step=step, tasks=tasks))
        write_records(rollout_file(run.rollouts, step, kind="test"), episode_records(groups[:1], decode, step=step))
    return run


def metrics(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    """One step's numbers: reward rises, entropy falls, one gradient explodes."""
    skill = 1 / (1 + math.exp(-10 * (step / steps - 0.4)))
    noise = rng.gauss(0, 0.05)
    truncated, parse = 0.35 * (1 - skill) + 0.02, 0.2 * (1 - skill)
    found = {
        "env/all/reward/total": skill * 0.85 + 0.05 + noise,
        "env/all/turns_per_episode": 4.5 - 1.2 * skill + noise,
        "env/all/ac_tokens_per_turn": 7 - 2 * skill + noise,
        "env/all/by_group/frac_mixed": 0.9 - 0.6 * skill,
        "env/all/by_group/frac_all_good": 0.05 + 0.6 * skill,
        "env/all/by_group/frac_all_bad": 0.05,
        "rollout/stop/terminated": 1 - truncated - parse - 0.01,
        "rollout/stop/max_turns": truncated,
        "rollout/stop/parse_failure": parse,
        "rollout/stop/env_error": 0.01,
        "rollout/stop/timeout": 0.0,
        "optim/lr": 3e-3 * min(1, (step + 1) / 10) * (1 - step / steps),
        "optim/grad_norm": math.inf if step == 17 else abs(0.4 + rng.gauss(0, 0.1)),
        "optim/entropy": 1.2 - 0.9 * skill + noise / 2,
        "optim/kl_sample_train_v1": 1e-4 + abs(noise) / 1e4,
        "optim/kl_sample_train_v2": 2e-4 + abs(noise) / 1e4,
        "optim/clip_fraction": 0.02 + abs(noise) / 10,
        "engine/decode_tokens": 3200,
        "engine/tokens_per_second": 2100 + 1000 * noise,
        "time/total": 2.9,
        "time/rollout": 1.6,
        "time/train": 1.0,
        "time/eval": 0.15,
        "time/rollout/env": 0.4,
        "progress/done_frac": (step + 1) / steps,
    }
    if step % 10 == 0 or step == steps - 1:
        found |= {"test/env/all/success": min(1.0, 0.1 + 0.85 * skill), "test/env/all/reward/total": skill}
    return found


def decode(tokens: tuple[int, ...]) -> str:
    """Bytes as text."""
    return bytes(tokens).decode(errors="replace")


def group(skill: float, rng: random.Random) -> TrajectoryGroup:
    """Four members: a winner, a rambler that loses, one whose environment failed, one cut by a budget."""
    game = "<|im_start|>user\nGuess my number, 1 to 16.<|im_end|>\n<|im_start|>assistant\n"
    higher = "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    winner = episode(
        ((game, "I say 8", 0.0), (higher, "So it is 12 \u2014 na\u00efve bisection", 1.0)),
        skill,
        rng,
        StopReason.TERMINATED,
    )
    loser = episode(((game, f"{HOSTILE} seven or so?", 0.0),), skill, rng, StopReason.PARSE_FAILURE)
    broken = episode(
        ((game, "8", 0.0),), skill, rng, StopReason.ENV_ERROR, "ConnectionError: game <b>server</b> went away"
    )
    cut = episode(((game, "8", 0.0), (higher, "9", 0.0), (higher, "10", 0.0)), skill, rng, StopReason.MAX_TURNS)
    return TrajectoryGroup(
        (winner, loser, broken, cut), (1.0 + skill / 10, -0.1, 0.0, 0.1), ({}, {}, {}, {}), ("guess",)
    )


def episode(
    turns: tuple[tuple[str, str, float], ...],
    skill: float,
    rng: random.Random,
    stop: StopReason,
    error: str | None = None,
) -> Trajectory:
    """Turns of (new observation text, action text, reward)."""
    context: tuple[int, ...] = ()
    transitions = []
    for i, (said, answer, reward) in enumerate(turns):
        context += tuple(said.encode())
        action = tuple(answer.encode())
        logprobs = tuple(-rng.expovariate(0.6 + 3 * skill) for _ in action)
        sample = Sample(action, logprobs, (int(60 * skill),) * len(action), "stop")
        last = i == len(turns) - 1
        transitions.append(
            Transition(context, sample, reward, last, metrics={"guesses": i + 1}, logs={"guess": answer})
        )
        context += action
    return Trajectory(tuple(transitions), stop, error)


if __name__ == "__main__":
    print(fabricate(Path(sys.argv[1])).path)
