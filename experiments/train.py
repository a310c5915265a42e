"""Trains a policy: `python -m experiments.train` runs the embedded default.

    python -m experiments.train                               # small mixture, arithmetic, 1 minute
    python -m experiments.train --preset smollm2-arithmetic   # a real pretrained model
    python -m experiments.train --model PATH --data questions.jsonl --template chat ...

Every field of the configuration is a flag: see --help; --print-config shows what a run would use.
The same command given again continues the run. The last line printed is JSON: eval_before,
eval_after, steps, seconds, run_dir.
"""

import time

_STARTED = time.perf_counter()

import json  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402

from experiments.flags import fail, parse, print_config  # noqa: E402
from rljax.errors import RljaxError  # noqa: E402


def main() -> int:
    """Parses the flags, trains, prints the result; 1 where the input must be corrected."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("rljax").setLevel(logging.INFO)
    logging.getLogger("absl").setLevel(logging.ERROR)
    arguments = sys.argv[1:]
    try:
        chosen = parse(arguments, "python -m experiments.train")
        if chosen.print_config:
            print(print_config(chosen))
            return 0
        from rljax import processes

        processes.initialize(chosen.config.processes)
        if not processes.is_first():
            logging.getLogger("rljax").setLevel(logging.WARNING)
        from rljax.training import train

        result = train(chosen.config, name=chosen.name, started=_STARTED)
    except RljaxError as error:
        return fail(error)
    except KeyboardInterrupt:
        print("stopped; the same command continues the run", file=sys.stderr)
        return 130
    if processes.is_first():
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
