"""The trainer on megatron-core, on GPUs and on CPUs."""

from miles_core.trainer.megatron import cpu

cpu.install()  # before anything of Megatron's is imported
