"""Trains a policy: `python -m experiments.train` runs the embedded default.

    python -m experiments.train                               # small mixture, arithmetic, 3 minutes
    python -m experiments.train --preset smollm2-arithmetic   # a real pretrained model
    python -m experiments.train --model PATH --data questions.jsonl --template chat ...

Every field of the configuration is a flag: see --help. The same command given again continues
the run. The last line printed is JSON: eval_before, eval_after, steps, seconds, run_dir.
"""

import time

_STARTED = time.perf_counter()

import json
import logging
import sys

from rljax.config import PRESETS, Config


def parse(arguments: list[str]) -> tuple[str, Config]:
    """The preset's name and its configuration with the flags applied."""
    import tyro

    name, rest = "arithmetic", []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--preset":
            name = next(remaining, "")
        elif argument.startswith("--preset="):
            name = argument.split("=", 1)[1]
        else:
            rest.append(argument)
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; the presets are {', '.join(PRESETS)}")
    config = tyro.cli(
        Config,
        args=rest,
        default=PRESETS[name](),
        prog="python -m experiments.train",
        description=f"--preset {{{','.join(PRESETS)}}} chooses the starting point; this is {name}.\n\n"
        f"{PRESETS[name].__doc__}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
        use_underscores=True,
    )
    return name, config


def main() -> int:
    """Parses the flags, trains, prints the result; 1 where the user must mend something."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("rljax").setLevel(logging.INFO)
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        name, config = parse(sys.argv[1:])
        from rljax.training import train

        result = train(config, name, _STARTED)
    except (ValueError, FileNotFoundError, FloatingPointError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues the run", file=sys.stderr)
        return 130
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
