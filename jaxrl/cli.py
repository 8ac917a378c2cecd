"""The `jaxrl` command: look at runs, export them, play environments. Knows arguments and which function serves them.

Nothing of jaxrl is imported before a command calls it (`_late`), so that help, and what is typed wrong, wait for no
library. Training is `python -m recipes.<name> key=value ...`.
"""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from chz.blueprint._entrypoint import EntrypointException


def _late(where: str) -> Callable[..., Any]:
    """The function `module:name`; its module is imported when it is called."""
    module, _, name = where.partition(":")
    return lambda *args, **options: attrgetter(name)(importlib.import_module(module))(*args, **options)


config_renderer = _late("jaxrl.config:config_renderer")
console = _late("rich.console:Console")
episode_text = _late("jaxrl.runtime.view:episode_text")
export_run = _late("jaxrl.runtime.trained:export_run")
exit_code = _late("jaxrl.runtime.failure:exit_code")
outcome = _late("jaxrl.runtime.report:outcome")
parse = _late("jaxrl.config:parse")
play_dataset = _late("jaxrl.runtime.play:play_dataset")
policy_tokenizer = _late("jaxrl.runtime.policy:policy_tokenizer")
read_metrics = _late("jaxrl.runtime.log:read_metrics")
read_records = _late("jaxrl.runtime.record:read_records")
rollout_file = _late("jaxrl.runtime.record:rollout_file")
run_dir_at = _late("jaxrl.runtime.run_dir:RunDir")
run_interruptible = _late("jaxrl.runtime.signals:run_interruptible")
explain = _late("jaxrl.algo.algorithm:explain")
variant = _late("jaxrl.algo.variants:variant")
variants = _late("jaxrl.algo.variants:VARIANTS.items")
write_report = _late("jaxrl.runtime.report:write_report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors a user can mend are one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt as interrupt:
        print(f"\njaxrl {options.command}: interrupted", file=sys.stderr)
        return exit_code(interrupt)
    except (FileExistsError, FileNotFoundError, ValueError, EntrypointException) as error:
        if getattr(error, "__notes__", None):
            raise  # it comes from inside an episode: whoever wrote the env needs the traceback
        print(f"jaxrl {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def report(run_dir: Path) -> int:
    """Write report.html and curve.png of a run; say how it went and where they are."""
    page = write_report(run_dir)
    print(f"{outcome(read_metrics(run_dir_at(run_dir).metrics))}\n{page}\n{run_dir_at(run_dir).curve}")
    return 0


def show(run_dir: Path, *, step: int | None, episodes: int, kind: str) -> int:
    """Print recorded episodes, those of the highest reward first."""
    screen = console(highlight=False, markup=False, emoji=False)
    file = _rollouts(run_dir_at(run_dir), step, kind)
    ranked = sorted(read_records(file), key=lambda r: -(r["reward"] or 0.0))
    for i, record in enumerate(ranked[:episodes]):
        if i:
            screen.rule(style="bright_black")
        screen.print(episode_text(record), soft_wrap=not screen.is_terminal)
    if len(ranked) > episodes:
        screen.print(
            f"\n{len(ranked) - episodes} more episodes in {file} (--episodes N shows more)", style="bright_black"
        )
    return 0


def play(recipe: str, arguments: Sequence[str]) -> int:
    """Play an episode of a recipe's environment. `split=` and `index=` choose it; the rest overrides the recipe.

    No weights are read: a recipe without a model of its own is played with the tiny model's bytes.
    """
    place = {"split": "test", "index": "0"}
    mine = {k: v for k, _, v in (argument.partition("=") for argument in arguments) if k in place}
    rest = [argument for argument in arguments if argument.partition("=")[0] not in place]
    split, index = (place | mine).values()
    if not index.isdecimal():
        raise ValueError(f"index={index}: expected 0 or more")
    config = parse(rest, **{"model_name": "tiny", **_recipe_defaults(recipe)})
    if config.dataset_builder is None:
        raise ValueError(f"{recipe} has no dataset_builder, so there is nothing to play")
    renderer = config_renderer(config, policy_tokenizer(config.model_name))

    async def episode(builder: Any = config.dataset_builder) -> None:
        await play_dataset(builder, renderer, split=split, index=int(index))

    run_interruptible(episode)
    return 0


def export(run_dir: Path, out: Path, *, merged: bool, step: int | None) -> int:
    """Write the adapter of a run, or the whole model, for others; say where."""
    print(export_run(run_dir, out, merged=merged, step=step))
    return 0


def algorithms(name: str | None, overrides: Sequence[str]) -> int:
    """Print the published algorithms, or the parts and knobs of one with overrides as `loss_fn_config` takes them."""
    screen = console(highlight=False, markup=False, emoji=False)
    if name is None:
        for row, v in variants():
            loss = v.loss if isinstance(v.loss, str) else v.loss.form.__name__
            extras = [f"kl={v.kl}"] * bool(v.kl) + [f"correction={v.correction}"] * bool(v.correction)
            parts = " ".join([f"advantage={v.advantage}", f"loss={loss}", f"aggregation={v.aggregation}", *extras])
            screen.print(f"{row:<20} {parts}  ({v.paper})", soft_wrap=True)
        return 0
    pairs = [argument.partition("=") for argument in overrides]
    for part in explain(variant(name), {key: _value(value) for key, _, value in pairs}):
        knobs = " ".join(f"{knob}={value}" for knob, value in part.knobs.items())
        screen.print(f"{part.kind}={part.name}  {knobs}".rstrip(), style="bold", soft_wrap=True)
        screen.print(f"    {part.says.strip()}\n", soft_wrap=True)
    return 0


def _value(text: str) -> float | str:
    """A number where the text is one."""
    try:
        return float(text)
    except ValueError:
        return text


def _recipe_defaults(recipe: str) -> Mapping[str, Any]:
    """The DEFAULTS of a recipe's module, found as `python -m` would find it."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(recipe)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{recipe}.".startswith(f"{error.name}."):
            raise  # the recipe is there; it is something it imports that is not
        raise ValueError(f"there is no recipe {recipe!r}; there are: {', '.join(_recipes(recipe))}") from None
    if not hasattr(module, "DEFAULTS"):
        raise ValueError(f"{recipe} has no DEFAULTS, so it says no environment to play")
    return module.DEFAULTS


def _recipes(asked: str) -> list[str]:
    """Modules beside the one asked for, or those of `recipes`."""
    for package in (asked.partition(".")[0], "recipes"):
        found = find_spec(package)
        if found and found.submodule_search_locations:
            return [f"{package}.{m.name}" for m in pkgutil.iter_modules(found.submodule_search_locations)]
    return []


def _rollouts(run: Any, step: int | None, kind: str) -> Path:
    """The file of a step, or the latest."""
    files = sorted(run.rollouts.glob(f"{kind}_*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run.path} has no recorded episodes ({run.rollouts.name}/{kind}_*.jsonl)")
    if step is None:
        return files[-1]
    file = rollout_file(run.rollouts, step, kind=kind)
    if file not in files:
        known = ", ".join(str(int(f.stem.rsplit("_", 1)[1])) for f in files[:12]) + (", ..." if len(files) > 12 else "")
        raise FileNotFoundError(f"{run.path} has no recorded episodes of step {step}; it has: {known}")
    return file


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxrl",
        description="Look at runs, export and play. Training is `python -m recipes.<name> key=value ...`.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("report", help="write report.html and curve.png of a run")
    _add_run_dir(command)
    command.set_defaults(run=lambda o: report(o.run_dir))
    command = commands.add_parser("show", help="print recorded episodes, best first")
    _add_run_dir(command)
    command.add_argument("--step", type=int, help="of this step (default: the latest recorded)")
    command.add_argument("--episodes", type=int, default=2, help="how many (default: 2)")
    command.add_argument("--test", action="store_true", help="of the held-out evaluation")
    command.set_defaults(
        run=lambda o: show(o.run_dir, step=o.step, episodes=o.episodes, kind="test" if o.test else "step")
    )
    command = commands.add_parser("play", help="play a recipe's environment yourself, in the place of the model")
    command.add_argument("recipe", metavar="RECIPE", help="a module with DEFAULTS, such as recipes.guess_number")
    command.add_argument(
        "arguments", nargs="*", metavar="key=value", help="split=test|train, index=0, and any key of the recipe"
    )
    command.set_defaults(run=lambda o: play(o.recipe, o.arguments))
    command = commands.add_parser("export", help="write what a run has trained, for PEFT or transformers")
    _add_run_dir(command)
    command.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    command.add_argument("--merged", action="store_true", help="the whole model in float32, not the adapter alone")
    command.add_argument("--step", type=int, help="of this checkpoint (default: the last)")
    command.set_defaults(run=lambda o: export(o.run_dir, o.out, merged=o.merged, step=o.step))
    command = commands.add_parser("algorithms", help="list the published algorithms, or explain one of them")
    command.add_argument("name", nargs="?", metavar="LOSS_FN", help="of which to show the parts and their knobs")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="as in loss_fn_config.<key>=<value>")
    command.set_defaults(run=lambda o: algorithms(o.name, o.overrides))
    return parser


def _add_run_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the log_path of a run")


if __name__ == "__main__":
    sys.exit(main())
