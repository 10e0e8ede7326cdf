"""Entry point of the training job on a cluster: reads its TrainSpec from the environment, prints metrics as lines."""

import json
import os

from miles_core.cluster.launch import METRICS_PREFIX, SPEC_VARIABLE
from miles_core.cluster.session import joined_ray
from miles_core.run import TrainSpec, train


def main() -> None:
    spec = TrainSpec.model_validate_json(os.environ[SPEC_VARIABLE])
    with joined_ray():
        train(spec, lambda metrics: print(METRICS_PREFIX + json.dumps(metrics), flush=True))


if __name__ == "__main__":
    main()
