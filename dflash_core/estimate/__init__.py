"""What a run will cost before it runs: rows, bytes on disk, memory and time of each stage.

    forecast = estimate(Plan(load_config("configs/demo.yaml")))
    forecast.stages["train"].memory                              # {"cpu": 486000000}

Counts are exact where an earlier stage has been run and guessed from the settings otherwise.
"""

from __future__ import annotations

from dflash_core.estimate.memory import Sizes
from dflash_core.estimate.rates import Rates
from dflash_core.estimate.stages import Estimate, Forecast, estimate

__all__ = ["Estimate", "Forecast", "Rates", "Sizes", "estimate"]
