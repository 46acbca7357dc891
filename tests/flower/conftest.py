import os
import sys
from pathlib import Path

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("examples/flower-app", "examples/deploy", "benchmarks")]
