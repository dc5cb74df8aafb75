"""Thin Prefect tasks, one stage a file: names, retries, artifacts and MLflow records around ``dflash_core.pipeline``.

Importing this package sets defaults of the environment that Prefect and MLflow read: telemetry is off, and MLflow's own
informational log stays out of the console.
"""

import os

_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the console has its own show, and the summary names the page
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "6",  # about two minutes, with pauses that double
    "DO_NOT_TRACK": "1",
}
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)
