import os
import sys
from pathlib import Path

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flower-app"))
