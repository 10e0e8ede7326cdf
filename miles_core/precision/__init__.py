"""Number formats of the trainer's matrix products."""
