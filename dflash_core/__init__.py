"""Train DFlash drafters and measure them: the library, without Prefect and MLflow, for a notebook or a bare machine."""
