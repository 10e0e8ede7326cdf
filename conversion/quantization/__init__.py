"""Low-precision rollout weights: one codec a format, one list of what is quantized."""
